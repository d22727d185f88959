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
    than a quarter of what the row keeps by its retention, rounded up.
    Departures: the paper looks at the last rows of the whole prompt, and pays for them once, here at those of each chunk; it
    finds how many columns and diagonals a head takes offline, here the budget divides by attention; its budgets of thousands of
    keys have room for 30 at either end, here about half of a small one is left to what the last rows attend to. It is one of
    the paper's three patterns, of which an offline search picks one for each head: the A-shape is `Streaming`, the block
    pattern `MeanKeys`, and here all heads have the same.
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
        """With the sums of the softmax, of columns and of diagonals, and which of the two is larger."""
        last = min(self.last, rows) / rows
        return EstimateCost.of(head_dim * last, 32) + EstimateCost.adding(3 * last + 1)

    def scores(self, chunk: Chunk) -> Tensor:
        columns, diagonals = sums(last_attention(chunk, self.last), chunk.positions[-self.last :])
        # A diagonal's sums by key: those by distance, backwards, from the row's own key on; 0 for keys after it.
        by_key = torch.nn.functional.pad(diagonals.flip(1), (0, chunk.keys)).unfold(1, chunk.keys, 1)
        scores = by_key[:, chunk.keys - 1 - chunk.positions]
        torch.maximum(scores, columns[:, None], out=scores)
        most = torch.ceil(keep_counts(chunk.retention, chunk.positions + 1) / 4)[..., None]  # keys at either end, [H, Q, 1]
        first = torch.arange(min(self.first, chunk.keys), device=scores.device).expand(*most.shape[:2], -1)
        recent = torch.arange(min(max(self.recent, 1), chunk.keys), device=scores.device)
        near = torch.where(recent == 0, 2 * max(self.first, self.recent, 1), most.clamp(max=self.recent) - recent)
        key = chunk.positions[:, None] - recent
        near = torch.where(key >= 0, near, 0)
        for keys, left in ((first, most.clamp(max=self.first) - first), (key.clamp(min=0).expand_as(near), near)):
            forced = torch.where(left > 0, ALWAYS * (1 + left / max(self.first, self.recent, 1)), -torch.inf)
            scores.scatter_reduce_(2, keys, forced.float(), "amax")
        return scores


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
