"""Exact attention on the selected keys only: the torch kernel. It takes indices; there is no mask to pass."""

import math

import torch
from torch import Tensor

from shadowattn.types import Selection

# Gathered K and V of one tile. Above the caches' size a larger tile gains nothing and only costs memory.
_TILE_BYTES = 16 << 20


def attend(q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None) -> Tensor:
    """Softmax attention of each row over its selected keys.

    q [H, Q, D]; k and v [G, K, D]; `scale` defaults to 1/√D. Computes in float32 and returns [H, Q, D] in q's dtype.
    """
    heads, rows, dim = q.shape
    groups, keys, _ = k.shape
    scale = 1 / math.sqrt(dim) if scale is None else scale
    block = selection.query_block
    k, v = k.reshape(-1, dim), v.reshape(-1, dim)
    first_key = (torch.arange(heads) // (heads // groups) * keys)[:, None, None]
    positions = torch.nn.functional.pad(selection.positions, (0, -rows % block)).view(-1, block)
    out = torch.empty_like(q)
    for tile in _tiles(selection.counts, heads * dim * 4):
        counts = selection.counts[:, tile]
        indices = selection.indices[:, tile, : int(counts.max())]
        flat = indices + first_key
        q_rows = q[:, tile.start * block : tile.stop * block].float()
        short = indices.shape[1] * block - q_rows.shape[1]
        q_blocks = torch.nn.functional.pad(q_rows, (0, 0, 0, short)).view(heads, -1, block, dim)
        logits = q_blocks @ k[flat].float().transpose(-1, -2) * scale
        padding = torch.arange(indices.shape[-1]) >= counts[..., None]
        hidden = padding[:, :, None] | (indices[:, :, None] > positions[tile, :, None]) & (block > 1)
        # Rows that only fill up the last block see nothing; whatever they compute is cut off below.
        weights = torch.softmax(logits.masked_fill(hidden, torch.finfo(torch.float32).min), -1)
        attended = (weights @ v[flat].float()).flatten(1, 2)
        out[:, tile.start * block : tile.stop * block] = attended[:, : q_rows.shape[1]].to(q.dtype)
    return out


def dense(q: Tensor, k: Tensor, v: Tensor, *, causal_offset: int, scale: float | None = None) -> Tensor:
    """torch's own dense causal attention, for heads that keep every key. Shapes as in `attend`, a batch before them allowed."""
    rows, keys = q.shape[-2], k.shape[-2]
    square = causal_offset == 0 and rows == keys
    seen = None
    if not square and rows > 1:
        seen = torch.arange(keys)[None, :] <= causal_offset + torch.arange(rows)[:, None]
    batched = [x if x.dim() == 4 else x[None] for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *batched, attn_mask=seen, is_causal=square, scale=scale, enable_gqa=True
    )
    return out.view_as(q)


def _tiles(counts: Tensor, bytes_per_slot: int):
    """Runs of neighbouring lists whose gathered keys stay under `_TILE_BYTES`."""
    longest = counts.amax(0).tolist()
    start = 0
    while start < len(longest):
        stop, slots = start + 1, longest[start]
        while stop < len(longest):
            slots = max(slots, longest[stop])
            if slots * (stop + 1 - start) * bytes_per_slot > _TILE_BYTES:
                break
            stop += 1
        yield slice(start, stop)
        start = stop
