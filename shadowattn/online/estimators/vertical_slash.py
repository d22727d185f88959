"""Columns and diagonals that the last rows attend to: MInference's vertical-slash pattern (arXiv 2407.02490, section 3.2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.budget import keep_counts
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.pages import ALWAYS
from shadowattn.types import EstimateCost


@dataclass(frozen=True)
class VerticalSlash(Estimator):
    """A key scores the larger of its column's and of its diagonal's attention, summed over the chunk's last `last` rows.

    Both sums share one unit, so the best keys of a row are the columns and the diagonals above one limit. The first `first` keys
    and the last `recent` before a row come before all others, a row's own before them, from both ends inwards; neither are more
    than a quarter of what the row keeps.
    Departures: the paper looks at the last rows of the whole prompt, here at those of each chunk; it finds how many columns and
    diagonals a head takes offline, here the budget divides by attention; its budgets of thousands of keys have room for 30 at
    either end, here half of a small one is left to what the last rows attend to.
    """

    last: int = 64
    first: int = 30
    recent: int = 30
    sees: ClassVar[str] = "chunk"

    def __post_init__(self):
        object.__setattr__(self, "last", checks.integer("last", self.last, least=1))
        for name in ("first", "recent"):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name)))

    @property
    def ranked_together(self) -> tuple[int, int]:
        return 0, 1

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(head_dim * min(self.last, rows) / rows, 32)

    def scores(self, chunk: Chunk) -> Tensor:
        columns, diagonals = sums(last_attention(chunk, self.last), chunk.positions[-self.last :])
        key = torch.arange(chunk.keys, device=chunk.q.device)
        distance = chunk.positions[:, None] - key
        scores = torch.maximum(columns[:, None], diagonals[:, distance.clamp(min=0)])
        most = torch.ceil(keep_counts(chunk.retention, chunk.positions + 1) / 4)[..., None]  # keys at either end, [H, Q, 1]
        early = most.clamp(max=self.first) - key
        near = torch.where(distance >= 0, most.clamp(max=self.recent) - distance, 0)
        forced = torch.maximum(early, near).clamp(min=0) / max(self.first, self.recent, 1)
        forced = torch.where(distance == 0, 2.0, forced)
        return torch.where(forced > 0, ALWAYS * (1 + forced), scores)


def last_attention(chunk: Chunk, last: int) -> Tensor:
    """The exact probabilities of the chunk's last rows, `last` of them or all, float32 [H, R, K]."""
    last_rows = chunk.asking(lambda q: q[:, -last:], chunk.positions[-last:])
    hidden = torch.arange(chunk.keys, device=chunk.q.device) > last_rows.positions[:, None]
    return torch.softmax((Oracle().scores(last_rows) * chunk.scale).masked_fill_(hidden, -torch.inf), -1)


def sums(attention: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Of attention [H, R, K] of rows at `positions` [R]: the sum of every column, [H, K], and of every diagonal, [H, K] by its
    distance from the row.
    """
    heads, _, keys = attention.shape
    distance = (positions[:, None] - torch.arange(keys, device=attention.device)).clamp(min=0)  # later keys have no attention
    diagonals = attention.new_zeros(heads, keys).index_add_(1, distance.flatten(), attention.flatten(1))
    return attention.sum(1), diagonals
