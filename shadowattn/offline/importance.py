"""Importance by ablation: how much worse the model gets without a head, without a layer (section 3.2).

Every ablation is one unit of work with a file of its own, holding the loss of each calibration window: stored when done,
skipped when it runs again, and made by any shard.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.models.shape import ModelShape, model_shape
from shadowattn.offline.ablations import BY_NAME, Ablation
from shadowattn.offline.shared_ablations import measure_exactly, measure_plainly
from shadowattn.offline.work import Progress, plan, shard
from shadowattn.types import AblationLosses, Importance


def named_ablation(name: str) -> Ablation:
    """The ablation of that name. Raises `InputError` on an unknown one."""
    if name not in BY_NAME:
        raise InputError(f"importance.ablation: expected one of {', '.join(BY_NAME)}, got {name!r}")
    return BY_NAME[name]


def measure_ablations(
    model: PreTrainedModel,
    windows: Tensor,
    units: Units,
    *,
    ablation: str = "zero",
    method: str = "shared",
    batch: int = 8,
    linear: str = "auto",
    shard_index: int = 0,
    shard_count: int = 1,
    progress: Progress = iter,
) -> AblationLosses | None:
    """Loss of every window with each head ablated, with each layer bypassed, and with nothing changed.

    `windows` int64 [W, T] of calibration text; `ablation` is `zero` or `uniform` (see `ablations`); `method` is `shared`, or
    `plain` for a full forward pass each; `units` keeps what is finished. Of several shards each measures its share; None comes
    back as long as other shards' units are missing. Raises `InputError` on an unknown ablation or method.
    """
    how, shape = named_ablation(ablation), model_shape(model)
    work = plan(shape, batch)
    mine = shard(work, shard_index, shard_count)
    if method == "shared":
        measure_exactly(model, windows, units, mine, ablation=how, batch=batch, linear=linear, progress=progress)
    elif method == "plain":
        measure_plainly(model, windows, units, mine, ablation=how, batch=batch, progress=progress)
    else:
        raise InputError(f"importance.method: expected shared, plain or racing, got {method!r}")
    if not all(units.has(key) for piece in work for key in piece.keys):
        return None
    return collect(units, shape, ablation, windows.shape[1])


def collect(units: Units, shape: ModelShape, ablation: str, window_tokens: int) -> AblationLosses:
    """All units of a finished measurement."""
    return AblationLosses(
        base=tuple(units.read(f"L{shape.layers}")),
        layers=tuple(tuple(units.read(f"L{layer}")) for layer in range(shape.layers)),
        heads=tuple(tuple(tuple(units.read(f"L{i}_H{h}")) for h in range(shape.heads)) for i in range(shape.layers)),
        ablation=ablation,
        window_tokens=window_tokens,
    )


def summarise(losses: AblationLosses, *, batch: int | None = None, windows: Sequence[int] | None = None) -> Importance:
    """Perplexities from losses: exp of their mean over all windows, or over some.

    With `batch`, the mean is that of batches of so many windows, all weighing the same, the last and shorter one too, as in the
    artifact's code. Where a race settled an ablation on the first windows alone, its mean is that of the plain
    model plus the mean increase on those: the increase varies far less from window to window than the loss does.
    """
    chosen = torch.arange(len(losses.base)) if windows is None else torch.as_tensor(windows)
    weights = torch.ones(len(chosen), dtype=torch.float64) / len(chosen)
    if batch is not None:
        parts = weights.split(batch)
        weights = torch.cat([torch.full_like(part, 1 / len(part) / len(parts)) for part in parts])
    plain = torch.tensor(losses.base, dtype=torch.float64)
    base = float(plain[chosen] @ weights)

    def perplexity(unit: tuple[float, ...]) -> float:
        measured = chosen < len(unit)
        kept = chosen[measured]
        increase = torch.tensor(unit, dtype=torch.float64)[kept] - plain[kept]
        return _exp(base + float(increase @ weights[measured] / weights[measured].sum()))

    return Importance(
        head_ppl=tuple(tuple(perplexity(head) for head in layer) for layer in losses.heads),
        layer_ppl=tuple(perplexity(layer) for layer in losses.layers),
        base_ppl=_exp(base),
        ablation=losses.ablation,
        tokens=len(chosen) * losses.window_tokens,
    )


def measure_importance(model: PreTrainedModel, windows: Tensor, units: Units, **options) -> Importance:
    """`measure_ablations` in one go, summed up: perplexities with equal weight for every window."""
    losses = measure_ablations(model, windows, units, **options)
    if losses is None:
        raise InputError("importance: expected all shards' units, some are missing; run the other shards first")
    return summarise(losses)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 709 else math.inf
