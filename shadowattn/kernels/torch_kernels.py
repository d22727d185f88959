"""The torch twins of the native kernels: plain, right, for any dtype and head dimension, and not fast."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.types import MOST_TILE_ROWS, Heads, Lists, Selection, UnionTiles

# Gathered K and V of one tile. On a CPU a tile beyond the caches' size gains nothing and only costs memory; on a GPU every tile
# is a dozen launches, which cost more than its arithmetic (on an H100 the larger size takes a third of the time off).
_CPU_TILE_BYTES, _GPU_TILE_BYTES = 4 << 20, 256 << 20
# On a GPU products with every key take fewer launches. What it may hold of their scores, in _SCORE_BYTES each: the score, its
# weight, whether it is kept.
_GPU_SCORE_BYTES, _SCORE_BYTES = 1 << 30, 4 + 4 + 2
_MOST_SCORES = 1 << 19  # that are selected from at once on a CPU


@dataclass(frozen=True)
class TorchKernels:
    name: str = "torch"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, heads: Heads, *, scale: float) -> Tensor:
        """Gathers K and V tile by tile; lists of one tile are padded to the longest of them. A GPU multiplies with every key and
        hides those that are in no list, where that reads fewer keys and the scores are not too many.
        """
        count, rows, dim = q.shape
        fewer = count * k.shape[1] <= len(selection.indices)
        if q.device.type != "cpu" and fewer and count * rows * k.shape[1] * _SCORE_BYTES <= _GPU_SCORE_BYTES:
            return attend_masked(q, k[heads.kv], v[heads.kv], selection, scale)
        keys, block = k.shape[1], selection.query_block
        k, v = k.reshape(-1, dim), v.reshape(-1, dim)
        first_key = (heads.kv * keys)[:, None, None]
        positions = torch.nn.functional.pad(selection.positions, (0, -rows % block)).view(-1, block)
        out = torch.empty_like(q)
        for tile in _tiles(selection.counts, count * dim * 4):
            counts = selection.counts[:, tile]
            indices = _padded(selection, tile)
            flat = indices + first_key
            q_rows = q[:, tile.start * block : tile.stop * block].float()
            short = indices.shape[1] * block - q_rows.shape[1]
            q_blocks = torch.nn.functional.pad(q_rows, (0, 0, 0, short)).view(count, -1, block, dim)
            logits = q_blocks @ k[flat].float().transpose(-1, -2) * scale
            padding = torch.arange(indices.shape[-1], device=q.device) >= counts[..., None]
            hidden = padding[:, :, None] | (indices[:, :, None] > positions[tile, :, None]) & (block > 1)
            # Rows that only fill up the last block see nothing; whatever they compute is cut off below.
            weights = torch.softmax(logits.masked_fill(hidden, torch.finfo(torch.float32).min), -1)
            attended = (weights @ v[flat].float()).flatten(1, 2)
            out[:, tile.start * block : tile.stop * block] = attended[:, : q_rows.shape[1]].to(q.dtype)
        return out

    def unite(self, selection: Selection, rows: int) -> UnionTiles:
        """A word a key and tile, to which each row of the tile that keeps the key adds its bit."""
        check_per_row(selection, rows)
        queries, lengths = len(selection.positions), selection.indptr.diff()
        blocks, keys = -(-queries // rows), int(selection.indices.max()) + 1
        head, row = torch.arange(len(lengths)) // queries, torch.arange(len(lengths)) % queries
        tile, bit = head * blocks + row // rows, torch.ones_like(row) << row % rows
        words = torch.zeros(len(lengths) // queries * blocks, keys, dtype=torch.int64)
        places = (tile * keys).repeat_interleave(lengths) + selection.indices
        words.view(-1).index_add_(0, places, bit.repeat_interleave(lengths))
        tile_of_key, key = words.nonzero().T
        counts = tile_of_key.bincount(minlength=len(words))
        ends = counts.cumsum(0)
        return UnionTiles(key.to(torch.int32), words[tile_of_key, key], ends - counts, ends, selection.positions, rows)

    def attend_tiles(self, q: Tensor, k: Tensor, v: Tensor, tiles: UnionTiles, heads: Heads, *, scale: float) -> Tensor:
        """By the rows' own lists."""
        return self.attend(q, k, v, tiles.per_row(), heads, scale=scale)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, causal_offset: int, scale: float) -> Tensor:
        """torch's own. Heads that do not fill their groups evenly are worked off group by group, so that K is never copied."""
        groups = heads.grouped()
        if len(groups) == len(k) and len({part.stop - part.start for _, part in groups}) == 1:
            return dense(q, k, v, causal_offset=causal_offset, scale=scale)
        parts = [(q[part], k[g : g + 1], v[g : g + 1]) for g, part in groups]
        return torch.cat([dense(*part, causal_offset=causal_offset, scale=scale) for part in parts])

    def select(self, scores: Tensor, lists: Lists, *, out: Tensor | None = None) -> Selection:
        """torch.topk for the k-th value, then ties in key order."""
        heads, blocks, keys = scores.shape
        counts = lists.indptr.diff().view(heads, blocks) - lists.tail
        # All heads at once where their copies are small, else some lists of one head.
        most = _MOST_SCORES if scores.device.type == "cpu" else _GPU_SCORE_BYTES // _SCORE_BYTES
        at_once, step = (heads, blocks) if heads * blocks * keys <= most else (1, max(1, most // keys))
        indices = torch.empty(lists.size, dtype=torch.int32, device=scores.device) if out is None else out
        for head in range(0, heads, at_once):
            some = slice(head, head + at_once)
            for first in range(0, blocks, step):
                part = slice(first, first + step)
                last = (head + at_once - 1) * blocks + min(first + step, blocks)
                start, stop = lists.indptr[[head * blocks + first, last]].tolist()
                chosen = _chosen(scores[some, part], counts[some, part], lists, part)
                if len(chosen) != stop - start:
                    raise InputError("scores: expected numbers, got NaN, of which no key is the best")
                indices[start:stop] = chosen
        return Selection(indices, lists.indptr, lists.positions, lists.query_block)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> Tensor:
    """Attention to the keys of `selection` by products with every key: q [H, Q, D], k and v [H, K, D]. Returns as q is."""
    heads, rows, keys = *q.shape[:2], k.shape[1]
    kept = torch.zeros(heads * selection.blocks, keys, dtype=torch.bool, device=q.device)
    lists = torch.arange(len(kept), device=q.device)
    lists = lists.repeat_interleave(selection.counts.flatten(), output_size=len(selection.indices))
    kept[lists, selection.indices.to(torch.int64)] = True
    kept = kept.view(heads, -1, keys).repeat_interleave(selection.query_block, 1)[:, :rows]
    if selection.query_block > 1:
        kept &= torch.arange(keys, device=q.device) <= selection.positions[:, None]
    logits = (q.float() @ k.float().mT).mul_(scale).masked_fill_(~kept, torch.finfo(torch.float32).min)
    return (torch.softmax(logits, -1) @ v.float()).to(q.dtype)


def check_per_row(selection: Selection, rows: int) -> None:
    """Raises `InputError` where rows share lists already, and on tiles of more rows than a word has bits."""
    checks.integer("rows", rows, least=1, most=MOST_TILE_ROWS)
    if selection.query_block != 1:
        raise InputError(f"query_block: expected lists of single rows, whose unions are tiles, got {selection.query_block}")


def dense(q: Tensor, k: Tensor, v: Tensor, *, causal_offset: int, scale: float | None = None) -> Tensor:
    """torch's own causal attention: q [H, Q, D], k and v [G, K, D], a batch before them allowed. Returns q's shape."""
    rows, keys = q.shape[-2], k.shape[-2]
    square = causal_offset == 0 and rows == keys
    seen = None
    if not square and not (rows == 1 and causal_offset == keys - 1):
        row, key = (torch.arange(count, device=q.device) for count in (rows, keys))
        seen = key <= causal_offset + row[:, None]
    batched = [x if x.dim() == 4 else x[None] for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *batched, attn_mask=seen, is_causal=square, scale=scale, enable_gqa=True
    )
    return out.view_as(q)


def _chosen(scores: Tensor, counts: Tensor, lists: Lists, part: slice) -> Tensor:
    """The keys of some of the lists, `part` of every head's, by scores [h, b, K]: int64, lists one after another."""
    candidates, tail = lists.candidates[part], lists.tail[part]
    key = torch.arange(scores.shape[-1], device=scores.device)
    # A score of −∞ would tie with the hidden keys, so none may come in.
    scores = scores.float().masked_fill(key >= candidates[:, None], -math.inf)
    # Of sinks and window as many as the budget holds, so that all who outrank the others are in, in any order.
    sinks = (counts - int(lists.self_first)).clamp(min=0, max=lists.sinks)
    recent = (counts - sinks).clamp(max=lists.recent)
    forced = (key < sinks[..., None]) | (key >= (candidates - recent)[..., None])
    chosen = _top(scores.masked_fill_(forced & (key < candidates[:, None]), math.inf), counts)
    chosen |= (key >= candidates[:, None]) & (key < (candidates + tail)[:, None])
    return chosen.nonzero()[:, -1]  # over heads, lists and keys in ascending order


def _top(scores: Tensor, counts: Tensor) -> Tensor:
    """The `counts` [H, B] largest of scores [H, B, K], ties to the lower index, as bool [H, B, K].

    torch.topk leaves ties open, so only its k-th *value* is used; ties with it are then taken in key order.
    """
    largest = torch.topk(scores, max(1, int(counts.max())), dim=-1).values
    threshold = largest.gather(-1, (counts[..., None] - 1).clamp(min=0))
    above, tied = scores > threshold, scores == threshold
    room = counts[..., None] - above.sum(-1, keepdim=True)
    return (above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))) & (counts[..., None] > 0)


def _padded(selection: Selection, tile: slice) -> Tensor:
    """The lists `tile` of all heads, int64 [H, lists, S], padded with key 0."""
    indptr = selection.indptr[:-1].view(-1, selection.blocks)[:, tile]
    counts = selection.counts[:, tile]
    slot = torch.arange(int(counts.max()), device=counts.device)
    inside = slot < counts[..., None]
    places = (indptr[..., None] + slot).masked_fill(~inside, 0)
    return selection.indices[places].to(torch.int64).masked_fill(~inside, 0)


def _tiles(counts: Tensor, bytes_per_slot: int) -> Iterator[slice]:
    """Runs of neighbouring lists whose gathered keys are not too many."""
    longest = counts.amax(0).tolist()
    most = _CPU_TILE_BYTES if counts.device.type == "cpu" else _GPU_TILE_BYTES
    start = 0
    while start < len(longest):
        stop, slots = start + 1, longest[start]
        while stop < len(longest):
            slots = max(slots, longest[stop])
            if slots * (stop + 1 - start) * bytes_per_slot > most:
                break
            stop += 1
        yield slice(start, stop)
        start = stop
