"""Which keys each index list ranks, how many it keeps, and by which scores. The kernels then select.

Causality is enforced here: the candidates of a row are the keys at or before its own position.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.budget import keep_count, keep_counts, shared_keep_counts
from shadowattn.online.chunk import Chunk
from shadowattn.types import Lists

BLOCK_SCORES = ("leading_query", "pooled_query", "max", "sum", "probability")
# How the scores of a block's rows become those of its list; the other two score one row of their own.
_POOLED = ("max", "sum", "probability")
_PART_BYTES = 4 << 20  # of float64 scores that are pooled at once


@dataclass(frozen=True)
class Rule:
    """How lists are made; every part is defined in `reference.select`.

    `query_block` rows share a list, ranked by `block_score`, which also holds their own keys. Within the budget a row's own key
    (where there is a recent window), the first `sinks` keys and the `recent` last ones outrank all others, in this order.
    The budget is what `budget.keep_counts` says: at least `min_budget` keys, whatever the retention, or all that a row sees.
    """

    query_block: int = 1
    block_score: str = "leading_query"
    sinks: int = 0
    recent: int = 0
    min_budget: int = 1

    def __post_init__(self):
        checks.one_of("block_score", self.block_score, BLOCK_SCORES)
        for name, least in (("query_block", 1), ("sinks", 0), ("recent", 0), ("min_budget", 1)):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), least=least))

    @property
    def pooling(self) -> str:
        """How rows' scores become a list's: `max`, `sum` or `probability`, or `rows` where a list has one scored row."""
        return self.block_score if self.query_block > 1 and self.block_score in _POOLED else "rows"

    def scored(self, chunk: Chunk) -> Chunk:
        """The chunk with the queries whose scores lists need: all of them, the first of each block or the block's mean."""
        block, rows = self.query_block, chunk.q.shape[1]
        if block == 1 or self.pooling != "rows":
            return chunk
        if self.block_score == "leading_query":
            return chunk.asking(lambda q: q[:, ::block], chunk.positions[::block])
        sizes = (rows - torch.arange(0, rows, block, device=chunk.q.device)).clamp(max=block)

        def means(q: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(q, (0, 0, 0, -rows % block)).unflatten(1, (-1, block))
            return (padded.double().sum(2) / sizes[:, None]).to(q.dtype)

        return chunk.asking(means, last_of_blocks(chunk.positions, block))

    def pool(self, scores: Tensor, positions: Tensor, logit_scales: Tensor | None = None) -> Tensor:
        """Scores [H, B, K] of lists, from scores [H, rows, K] of the queries that `scored` named.

        `logit_scales` float32 [H], for `probability` alone: what scores are multiplied by to become the logits of a softmax.
        """
        if self.pooling == "rows":
            return scores
        heads, rows, keys = scores.shape
        pooled = scores.new_empty(heads, -(-rows // self.query_block), keys, dtype=torch.float32)
        # Some blocks of one head at a time: a copy of all scores in float64 would be the largest tensor of a chunk.
        blocks = max(1, _PART_BYTES // (8 * keys * self.query_block))
        of_heads = logit_scales.tolist() if self.pooling == "probability" else [1.0] * heads
        for head, logit_scale, into in zip(scores, of_heads, pooled, strict=True):
            for first in range(0, len(into), blocks):
                part = slice(first * self.query_block, (first + blocks) * self.query_block)
                into[first : first + blocks] = self._pool(head[part], logit_scale, positions[part])
        return pooled

    def _pool(self, scores: Tensor, logit_scale: float, positions: Tensor) -> Tensor:
        """Scores [B, K] of whole blocks of one head's rows, from scores [rows, K]; `logit_scale` as in `pool`."""
        rows, keys = scores.shape
        later = torch.arange(keys, device=scores.device) > positions[:, None]
        fill = -math.inf if self.pooling == "max" else 0.0
        if self.pooling == "probability":
            scores = torch.softmax((scores.double() * logit_scale).masked_fill(later, -math.inf), -1)
        else:
            scores = scores.float().masked_fill(later, fill)  # in float also where a graph gives INT8 scores
        blocks = torch.nn.functional.pad(scores, (0, 0, 0, -rows % self.query_block), value=fill)
        blocks = blocks.unflatten(-2, (-1, self.query_block))
        return blocks.amax(-2) if self.pooling == "max" else blocks.sum(-2, dtype=torch.float64).float()

    def lists(self, retention: Tensor, positions: Tensor) -> Lists:
        """Budgets and places of all lists of heads with `retention` float64 [H], for rows at `positions` int64 [Q]."""
        if self.query_block == 1:
            candidates, tail, recent = positions + 1, torch.zeros_like(positions), self.recent
            lengths = keep_counts(retention, candidates, self.min_budget)
        else:
            candidates, recent = positions[:: self.query_block].contiguous(), max(0, self.recent - 1)  # the row's own key follows
            tail = last_of_blocks(positions, self.query_block) + 1 - candidates
            lengths = shared_keep_counts(retention, positions + 1, self.query_block, self.min_budget) + tail
        indptr = lengths.new_zeros(lengths.numel() + 1)
        torch.cumsum(lengths.flatten(), 0, out=indptr[1:])
        self_first = self.query_block == 1 and self.recent > 0
        return Lists(candidates, tail, indptr, positions, self.query_block, self.sinks, recent, self_first)

    def step_lists(self, retention: list[float], positions: Tensor) -> Lists:
        """The same for the one row of a decoding step, at `positions` int64 [1], of lists with `retention` each."""
        keys = int(positions[0]) + 1
        ends = accumulate((keep_count(kept, keys, self.min_budget) for kept in retention), initial=0)
        candidates, tail, indptr = torch.tensor([keys]), torch.tensor([0]), torch.tensor(list(ends))
        if positions.device.type != "cpu":
            candidates, tail, indptr = (x.to(positions.device) for x in (candidates, tail, indptr))
        return Lists(candidates, tail, indptr, positions, 1, self.sinks, self.recent, self.recent > 0)


def last_of_blocks(x: Tensor, block: int) -> Tensor:
    """The last of each `block` neighbours on the last axis, of fewer at its end."""
    whole = x[..., block - 1 :: block]
    return torch.cat([whole, x[..., -1:]], -1) if x.shape[-1] % block else whole
