"""A pattern a head and chunk: blocks by their mean, or columns and diagonals (FlexPrefill, arXiv 2502.20766, section 3)."""

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.blocks import mean_rows, row_scores
from shadowattn.online.estimators.mean_keys import Means
from shadowattn.online.estimators.pages import MOST_KEYS
from shadowattn.online.estimators.vertical_slash import VerticalSlash, last_attention
from shadowattn.types import EstimateCost


@dataclass(frozen=True)
class FlexPrefill(Estimator):
    """q̄ · k̄ ranks blocks where means of `block` keys predict how the last `block` rows attend; else `VerticalSlash` ranks.

    They predict it where the square root of the Jensen-Shannon divergence (in nat) between the softmax of q̄ · k̄, of the mean of
    those rows, and their attention summed by blocks is less than `limit`.
    Departures: the paper decides once, by the last rows of the whole prompt, and pays for them once, here every chunk decides. It
    takes keys until a share of the attention is reached, of columns and of diagonals each that share, and of blocks over a map
    that is normalised over all blocks of rows, so that these differ in their budgets, and at least 512 to 1024 keys; here the
    retention decides, alike for all blocks of rows, and columns and diagonals have one limit. A row's own block is always kept,
    and `VerticalSlash` keeps its keys at either end, which the paper does not.
    """

    block: int = 128
    limit: float = 0.1
    decided: Counter = field(default_factory=Counter, init=False, repr=False, compare=False)  # heads of chunks, True by blocks
    sees: ClassVar[str] = "chunk"

    def __post_init__(self):
        checks.fields(self, checks.integer, "block", least=1, most=MOST_KEYS)
        checks.fields(self, checks.number, "limit", least=0, most=1)  # the root is at most √ln 2: 1 ranks blocks everywhere

    @property
    def vertical_slash(self) -> VerticalSlash:
        """What ranks where means do not predict."""
        return VerticalSlash(self.block)

    @property
    def ranked_together(self) -> tuple[int, int]:
        """Where means rank; elsewhere all rows of a chunk have one pattern, of single keys."""
        return self.block, self.block

    def counts(self) -> dict[str, float]:
        return super().counts() | ({"block_heads": self.decided[True] / self.decided.total()} if self.decided else {})

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        """As if each pattern ranked in every head: the last rows' attention decides, and serves `VerticalSlash` too."""
        of_blocks = head_dim / (min(self.block, rows) * self.block)
        pooling = EstimateCost.deriving(2 * head_dim, keys=keys)
        return EstimateCost.of(of_blocks, 32) + pooling + self.vertical_slash.cost(head_dim, rows, keys)

    def scores(self, chunk: Chunk) -> Tensor:
        (means,) = chunk.cache.derived(f"means of {self.block} keys", lambda: Means(self.block), chunk.k).figures
        predicted = self.divergence(chunk, means[chunk.heads.kv]).sqrt() < self.limit
        self.decided.update(predicted.tolist())
        scores = chunk.q.new_empty(*chunk.q.shape[:2], chunk.keys, dtype=torch.float32)
        if bool(predicted.any()):
            some = chunk[predicted.nonzero()[:, 0].tolist()]
            scores[predicted] = row_scores(some, mean_rows(some, self.block) @ means[some.heads.kv].mT, self.block, self.block)
        if not bool(predicted.all()):
            scores[~predicted] = self.vertical_slash.scores(chunk[(~predicted).nonzero()[:, 0].tolist()])
        return scores

    def divergence(self, chunk: Chunk, means: Tensor) -> Tensor:
        """The Jensen-Shannon divergence in nat, float32 [H], for the mean keys [H, P, D]."""
        mean = chunk.q[:, -self.block :].float().mean(1, keepdim=True)
        pooled = torch.softmax((mean @ means.mT)[:, 0] * chunk.scale, -1)
        attention = last_attention(chunk, self.block).mean(1)
        truth = F.pad(attention, (0, -chunk.keys % self.block)).unflatten(1, (-1, self.block)).sum(2)
        pooled, truth = pooled.double(), truth.double()  # the least float32 halved is 0, and its logarithm no number
        middle = (pooled + truth) / 2
        divergence = sum((torch.xlogy(x, x) - torch.xlogy(x, middle)).sum(-1) for x in (pooled, truth)) / 2
        return divergence.clamp(min=0).float()
