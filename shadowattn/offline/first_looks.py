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
    products, and from what a first look lets through.

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
        of_flat, of_looked = list_mass(chunk, _selected(flat, chunk), _selected(looked, chunk))
        lost[chunk.layer] += of_flat - of_looked

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    return FirstLookLosses((lost / windows.numel()).tolist(), candidates, block_rows, fingerprint(model))


def _selected(estimator: Int8Fused, chunk: Chunk) -> Selection:
    rule = Rule()
    kernels = choose("auto", head_dim=chunk.q.shape[2], dtype=chunk.q.dtype, device=chunk.q.device)
    return estimator.select(chunk, rule, rule.lists(chunk.retention, chunk.positions), kernels)


def list_mass(chunk: Chunk, *selections: Selection) -> Tensor:
    """What of each head's exact attention stands on the lists of its single rows, the sum over rows: float64 [selections, H], on
    the CPU. Holds some float32 [Q, K], those of one head.
    """
    device, rows = chunk.q.device, chunk.q.shape[1]
    hidden = torch.arange(chunk.keys, device=device) > chunk.positions[:, None]
    mass = torch.zeros(len(selections), len(chunk.heads), dtype=torch.float64)
    for head in range(len(chunk.heads)):
        scores = Oracle().scores(chunk[[head]])[0] * chunk.scale
        weights = torch.softmax(scores.masked_fill_(hidden, -torch.inf), -1)
        for at, selection in enumerate(selections):
            ends = selection.indptr[head * rows : (head + 1) * rows + 1].to(device)
            row = torch.arange(rows, device=device).repeat_interleave(ends.diff())
            keys = selection.indices[int(ends[0]) : int(ends[-1])].long()
            mass[at, head] = weights[row, keys].double().sum()
    return mass
