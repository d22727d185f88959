"""Scores in, key indices out. Causality lives here: a row is offered only the keys at or before its own position."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.budget import keep_counts
from shadowattn.types import Lists

BLOCK_SCORES = ("first_row", "pooled_query", "max", "sum")


@dataclass(frozen=True)
class Rule:
    """How lists are made; every part is defined in `reference.select`.

    `query_block` rows share a list, ranked by `block_score`. The first `sinks` keys and the last `recent` ones outrank all
    others, within the same budget.
    """

    query_block: int = 1
    block_score: str = "first_row"
    sinks: int = 0
    recent: int = 0

    def __post_init__(self):
        checks.one_of("block_score", self.block_score, BLOCK_SCORES)
        for name, least in (("query_block", 1), ("sinks", 0), ("recent", 0)):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), least=least))

    @property
    def pooling(self) -> str:
        """How rows' scores become a list's: `max` or `sum` over the block's rows, or `rows` where a list has one scored row."""
        return self.block_score if self.query_block > 1 and self.block_score in ("max", "sum") else "rows"

    def scored(self, q: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The queries [H, rows, D] whose scores lists need, and where they stand: all, the first of each block or its mean."""
        block, rows = self.query_block, q.shape[1]
        if block == 1 or self.pooling != "rows":
            return q, positions
        if self.block_score == "first_row":
            return q[:, ::block], positions[::block]
        padded = torch.nn.functional.pad(q, (0, 0, 0, -rows % block)).unflatten(1, (-1, block))
        sizes = (rows - torch.arange(0, rows, block)).clamp(max=block)
        return (padded.double().sum(2) / sizes[:, None]).to(q.dtype), _last_of_blocks(positions, block)

    def pool(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Scores [H, B, K] of lists, from scores [H, rows, K] of the queries that `scored` named."""
        if self.pooling == "rows":
            return scores
        heads, rows, keys = scores.shape
        fill = -math.inf if self.pooling == "max" else 0.0
        scores = scores.masked_fill(torch.arange(keys) > positions[:, None], fill)
        blocks = torch.nn.functional.pad(scores, (0, 0, 0, -rows % self.query_block), value=fill)
        blocks = blocks.view(heads, -1, self.query_block, keys)
        return blocks.amax(2) if self.pooling == "max" else blocks.sum(2, dtype=torch.float64).float()

    def lists(self, retention: Tensor, positions: Tensor) -> Lists:
        """Budgets and places of all lists of heads with `retention` float64 [H], for rows at `positions` int64 [Q]."""
        visible = positions + 1
        first, last = visible[:: self.query_block], _last_of_blocks(visible, self.query_block)
        pooled = self.query_block > 1 and self.block_score != "first_row"
        offered = last if pooled else first
        appended = torch.zeros_like(first) if pooled else last - first
        lengths = keep_counts(retention, offered) + appended
        starts = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
        return Lists(
            offered.contiguous(), first - 1 if pooled else None, appended, starts, positions, self.query_block, self.sinks,
            self.recent,
        )  # fmt: skip


def _last_of_blocks(x: Tensor, query_block: int) -> Tensor:
    ends = torch.arange(query_block - 1, x.shape[0] + query_block - 1, query_block)
    return x[ends.clamp(max=x.shape[0] - 1)]
