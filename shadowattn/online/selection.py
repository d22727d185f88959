"""Scores in, key indices out. Causality lives here: a row is offered only the keys at or before its own position."""

import math

import torch
from torch import Tensor

from shadowattn.budget import keep_counts
from shadowattn.errors import InputError
from shadowattn.types import Selection

BLOCK_SCORES = ("first_row", "max")


def scored_rows(rows: int, query_block: int, block_score: str) -> slice:
    """The rows of a chunk whose scores `select` needs: all of them, or the first of each block."""
    if block_score not in BLOCK_SCORES:
        raise InputError(f"block_score: expected one of {', '.join(BLOCK_SCORES)}, got {block_score!r}")
    if query_block < 1:
        raise InputError(f"query_block: expected at least 1 row, got {query_block}")
    return slice(0, rows, query_block if block_score == "first_row" else 1)


def select(
    scores: Tensor, retention: Tensor, positions: Tensor, *, query_block: int = 1, block_score: str = "first_row"
) -> Selection:
    """The exact top-k of every list, ties to the lower index.

    scores [H, rows, K], of the rows named by `scored_rows`; retention float64 [H]; positions int64 [Q] of all rows. A
    row keeps max(1, ceil(retention × visible)) keys. A block's list is its first row's top-k plus the keys
    between that row and the block's end (`first_row`, strictly causal), or the top-k of the largest score over its
    rows (`max`); both are defined in `reference.select`.
    """
    visible = positions + 1
    first, last = visible[::query_block], _last_of_blocks(visible, query_block)
    if query_block == 1 or block_score == "first_row":
        scores, offered = _hide(scores, first), first
    else:
        scores, offered = _pool_max(_hide(scores, visible), query_block), last
        scores.scatter_(-1, (first - 1).expand(scores.shape[0], -1)[..., None], math.inf)
    counts = keep_counts(retention, offered)
    chosen = _top(scores, counts)
    if query_block > 1 and block_score == "first_row":
        key = torch.arange(scores.shape[-1])
        local = (key >= first[:, None]) & (key < last[:, None])
        chosen, counts = chosen | local, counts + (last - first)
    return Selection(_pack(chosen, counts), counts, positions, query_block)


def _hide(scores: Tensor, visible: Tensor) -> Tensor:
    """Scores with every key a row does not see at −∞. A score of −∞ would tie with them, so none may come in."""
    return scores.masked_fill(torch.arange(scores.shape[-1]) >= visible[:, None], -math.inf)


def _last_of_blocks(visible: Tensor, query_block: int) -> Tensor:
    ends = torch.arange(query_block - 1, visible.shape[0] + query_block - 1, query_block)
    return visible[ends.clamp(max=visible.shape[0] - 1)]


def _pool_max(scores: Tensor, query_block: int) -> Tensor:
    """Largest score over each block's rows, [H, B, K]; the last block may be short."""
    heads, rows, keys = scores.shape
    short = -rows % query_block
    padded = torch.nn.functional.pad(scores, (0, 0, 0, short), value=-math.inf)
    return padded.view(heads, -1, query_block, keys).amax(2)


def _top(scores: Tensor, counts: Tensor) -> Tensor:
    """The `counts` [H, B] largest of scores [H, B, K], ties to the lower index, as bool [H, B, K].

    torch.topk leaves ties open, so only its k-th *value* is used; ties with it are then taken in key order.
    """
    largest = torch.topk(scores, int(counts.max()), dim=-1).values
    threshold = largest.gather(-1, counts[..., None] - 1)
    above, tied = scores > threshold, scores == threshold
    room = counts[..., None] - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))


def _pack(chosen: Tensor, counts: Tensor) -> Tensor:
    """Ascending index lists [H, B, S] of the chosen keys, padded with 0."""
    indices = torch.zeros(*counts.shape, int(counts.max()), dtype=torch.int64)
    slots = torch.arange(indices.shape[-1]) < counts[..., None]
    indices[slots] = chosen.nonzero()[:, -1]  # both run over heads, lists and keys in ascending order
    return indices
