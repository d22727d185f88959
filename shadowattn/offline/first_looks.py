"""Which heads a first look by a block's mean query serves badly: the attention mass that their lists lose by it.

A few heads lose most of it. They can look at every key instead (`online/estimators/hierarchical.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.budget import head_retentions
from shadowattn.engine.observe import observe_prefill
from shadowattn.kernels import choose
from shadowattn.models.shape import fingerprint, model_shape
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.selection import Rule
from shadowattn.types import FirstLookLosses, KeyOffset, Selection


def observe_first_look(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    chunk_tokens: int,
    candidates: float = 2.0,
    block_rows: int = 64,
    retention: float = 0.1,
    key_offset: KeyOffset | None = None,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> FirstLookLosses:
    """Runs the windows [W, T] through the model, dense, in chunks, and makes every row's list twice: from all keys by its INT8
    products, and from what a first look lets through. Holds some float32 [H, Q, K] of one chunk of a layer.

    `candidates` and `block_rows` are those of `Hierarchical`; every head keeps `retention` of what a row sees. The scales are the
    measured ones, of K less `key_offset`. Raises `InputError` on settings that do not fit, and on a model with sliding windows.
    """
    shape = model_shape(model)
    kept = head_retentions(retention, shape.heads)
    flat = Int8Fused(key_offset=key_offset)
    looked = Hierarchical(key_offset=key_offset, candidates=candidates, block_rows=block_rows)
    lost = torch.zeros(shape.layers, shape.heads, dtype=torch.float64)

    def observe(chunk: Chunk) -> None:
        chunk = replace(chunk, retention=kept.to(chunk.q.device))
        hidden = torch.arange(chunk.keys, device=chunk.q.device) > chunk.positions[:, None]
        weights = torch.softmax((Oracle().scores(chunk) * chunk.scale).masked_fill_(hidden, -torch.inf), -1)
        of_flat, of_looked = _mass(weights, _selected(flat, chunk)), _mass(weights, _selected(looked, chunk))
        lost[chunk.layer] += of_flat - of_looked

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    return FirstLookLosses((lost / windows.numel()).tolist(), candidates, block_rows, fingerprint(model))


def _selected(estimator: Int8Fused, chunk: Chunk) -> Selection:
    rule = Rule()
    kernels = choose("auto", head_dim=chunk.q.shape[2], dtype=chunk.q.dtype, device=chunk.q.device)
    return estimator.select(chunk, rule, rule.lists(chunk.retention, chunk.positions), kernels)


def _mass(weights: Tensor, selection: Selection) -> Tensor:
    """What of weights [H, Q, K] stands on each head's lists of single rows, the sum over rows: float64 [H], on the CPU."""
    lengths = selection.indptr.diff().to(weights.device)
    row = torch.arange(len(lengths), device=weights.device).repeat_interleave(lengths)
    found = weights.flatten(0, 1)[row, selection.indices.long()].double()
    return (
        torch.zeros(len(lengths), dtype=torch.float64, device=weights.device)
        .index_add(0, row, found)
        .view(len(weights), -1)
        .sum(1)
        .cpu()
    )
