"""Importance by ablation: how much worse the model gets without a head, without a layer (section 3.2).

One perplexity for each head and each layer, over the same short windows of calibration text. Every ablation is one unit of
work: stored when done, skipped when it runs again.
"""

import math
from collections.abc import Callable, Iterable

from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import batch_losses
from shadowattn.models.patch import bypass_layer, model_shape, replace_attention
from shadowattn.offline.ablations import BY_NAME
from shadowattn.types import Importance


def measure_importance(
    model: PreTrainedModel,
    windows: Tensor,
    units: Units,
    *,
    ablation: str = "zero",
    batch: int = 8,
    progress: Callable[[list], Iterable] = iter,
) -> Importance:
    """Perplexities with each head ablated, with each layer bypassed, and with nothing changed.

    `windows` int64 [W, T] of calibration text; `ablation` is `zero` or `uniform` (see `ablations`); `units` keeps what is
    finished. Raises `InputError` on an unknown ablation.
    """
    if ablation not in BY_NAME:
        raise InputError(f"importance.ablation: expected one of {', '.join(BY_NAME)}, got {ablation!r}")
    shape = model_shape(model)

    def perplexity() -> float:
        return math.exp(float(batch_losses(model, windows, batch=batch).mean()))

    def without_head(layer: int, head: int) -> float:
        with replace_attention(model, BY_NAME[ablation](layer, head)):
            return perplexity()

    def without_layer(layer: int) -> float:
        with bypass_layer(model, layer):
            return perplexity()

    work = {"base": perplexity}
    for layer in range(shape.layers):
        work[f"L{layer}"] = lambda layer=layer: without_layer(layer)
        for head in range(shape.heads):
            work[f"L{layer}_H{head}"] = lambda layer=layer, head=head: without_head(layer, head)
    measured = {key: units.get(key, work[key]) for key in progress(list(work))}
    return Importance(
        head_ppl=tuple(tuple(measured[f"L{i}_H{h}"] for h in range(shape.heads)) for i in range(shape.layers)),
        layer_ppl=tuple(measured[f"L{i}"] for i in range(shape.layers)),
        base_ppl=measured["base"],
        ablation=ablation,
        tokens=windows.numel(),
    )
