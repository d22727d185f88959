"""Losses under ablation, fast and exact: what ablations have in common is computed once.

An ablation in layer l changes nothing before it, so the hidden states that enter l are kept and passed on layer by layer; the
heads of a layer share everything up to the output projection; heads run as one batch; and logits exist a slice at a time.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.artifacts import Units
from shadowattn.evaluation.perplexity import batch_losses
from shadowattn.models.layerwise import Layerwise, layerwise
from shadowattn.models.linear import choose_linear
from shadowattn.models.registry import bypass_layer, replace_attention
from shadowattn.models.shape import model_shape
from shadowattn.offline.ablations import Ablated, Ablation, head_variants
from shadowattn.offline.work import AblationWork, Progress


def measure_exactly(
    model: PreTrainedModel,
    windows: Tensor,
    units: Units,
    work: list[AblationWork],
    *,
    ablation: Ablation,
    batch: int,
    linear: str = "auto",
    progress: Progress = iter,
) -> None:
    """Stores each window's loss, [W], under every ablation of `work` in `units`; pieces that are all there are skipped.

    `windows` int64 [W, T]; `batch` sequences, ablated ones counted singly, run at a time; `linear` as in `models.linear`.
    Holds the hidden states of all windows once, W × T × C in the model's dtype.
    """
    todo = [piece for piece in work if not all(units.has(key) for key in piece.keys)]
    if not todo:
        return
    windows = windows.to(model.device)
    with layerwise(model, windows.shape[1], choose_linear(linear)) as layers:
        hidden = torch.cat([layers.embed(ids) for ids in windows.split(batch)])
        at, last = 0, model_shape(model).layers
        for piece in progress(sorted(todo, key=lambda piece: piece.layer)):
            while at < piece.layer:
                for part in hidden.split(batch):
                    part.copy_(layers.layer(at, part))
                at += 1
            if piece.heads:
                losses = _head_losses(layers, piece, hidden, windows, ablation, batch)
            else:
                first = min(piece.layer + 1, last)
                parts = zip(hidden.split(batch), windows.split(batch), strict=True)
                losses = torch.cat([layers.losses(layers.rest(first, part), ids) for part, ids in parts])[None]
            for key, row in zip(piece.keys, losses.tolist(), strict=True):
                units.put(key, row)


def measure_plainly(
    model: PreTrainedModel,
    windows: Tensor,
    units: Units,
    work: list[AblationWork],
    *,
    ablation: Ablation,
    batch: int,
    progress: Progress = iter,
) -> None:
    """The same the plain way: a full forward pass of the model for every ablation. What `measure_exactly` is checked against."""
    last = model_shape(model).layers

    def losses(context) -> list[float]:
        with context:
            return batch_losses(model, windows, batch=batch).tolist()

    for piece in progress([piece for piece in work if not all(units.has(key) for key in piece.keys)]):
        if piece.layer == last:
            units.put(piece.keys[0], batch_losses(model, windows, batch=batch).tolist())
        elif not piece.heads:
            units.put(piece.keys[0], losses(bypass_layer(model, piece.layer)))
        for head, key in zip(piece.heads, piece.keys, strict=False):
            units.put(key, losses(replace_attention(model, Ablated(piece.layer, head, ablation))))


def _head_losses(
    layers: Layerwise, piece: AblationWork, hidden: Tensor, windows: Tensor, ablation: Ablation, batch: int
) -> Tensor:
    """float64 [n, W] for the n heads of a piece."""

    variants = head_variants([(head, ablation) for head in piece.heads])
    count, parts = len(piece.heads), []
    together = max(1, batch // count)
    for part, ids in zip(hidden.split(together), windows.split(together), strict=True):
        after = layers.varied(piece.layer, part, variants)
        after = layers.rest(piece.layer + 1, after.flatten(0, 1))
        parts.append(layers.losses(after, ids.repeat(count, 1)).view(count, -1))
    return torch.cat(parts, 1)
