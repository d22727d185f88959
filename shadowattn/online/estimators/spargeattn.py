"""Blocks of keys whose keys are alike, by their mean (SpargeAttn, arXiv 2502.18137, section 3.2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.blocks import mean_rows, row_scores
from shadowattn.online.estimators.mean_keys import Means
from shadowattn.online.estimators.pages import ALWAYS, MOST_KEYS
from shadowattn.types import EstimateCost


def likeness(k: Tensor, block: int) -> Tensor:
    """The mean cosine of all pairs of keys of a block, less the mean of all keys; [G, P] of k [G, K, D].

    It is the squared length of the mean of the keys, each of length one, and so not below 0.
    """
    k = k.float()
    (mean,) = Means(block).sum_up(F.normalize(k - k.mean(1, keepdim=True), dim=-1), k.shape[1] // block)
    return mean.square().sum(-1)


@dataclass(frozen=True)
class SpargeAttn(Estimator):
    """A block of `key_block` keys scores q̄ · k̄ for a block of `query_block` rows; one whose keys are unlike comes before all.

    Unlike: the mean cosine of its pairs of keys, less the mean of all keys so far, is less than `likeness`, so that the mean says
    little of them. The default is the authors' for a fixed budget, and calls none unlike: the mean cosine of all pairs, those of
    a key with itself among them, is not below 0.
    Departures: blocks of unlike rows attend to every key in the paper, here to as many as all; it keeps half of the blocks, or
    those whose softmax sums to a share, here retention decides; a row's own block is always kept; the second stage, which skips
    products of small probability, is not of the estimate. Taking the mean key off q̄ · k̄ and the softmax change no ranking of
    a row.
    """

    query_block: int = 128
    key_block: int = 64
    likeness: float = -0.1
    sees: ClassVar[str] = "chunk"

    def __post_init__(self):
        checks.fields(self, checks.integer, "query_block", least=1)
        checks.fields(self, checks.integer, "key_block", least=1, most=MOST_KEYS)
        checks.fields(self, checks.number, "likeness", least=-1, most=1)  # cosines

    @property
    def ranked_together(self) -> tuple[int, int]:
        return self.query_block, self.key_block

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        """With the means, and where `likeness` calls any block unlike, the keys less their mean, their lengths and their mean."""
        means = EstimateCost.of(head_dim / (min(self.query_block, rows) * self.key_block), 32)
        operations = 2 * head_dim + 5 * head_dim * (self.likeness > 0)
        return means + EstimateCost.deriving(operations, keys=keys)

    def scores(self, chunk: Chunk) -> Tensor:
        (means,) = chunk.cache.derived(f"means of {self.key_block} keys", lambda: Means(self.key_block), chunk.k).figures
        scores = mean_rows(chunk, self.query_block) @ means[chunk.heads.kv].mT
        if self.likeness > 0:
            alike = chunk.once(f"likeness of {self.key_block} keys", lambda: likeness(chunk.k, self.key_block))
            scores = torch.where(alike[chunk.heads.kv][:, None] < self.likeness, ALWAYS, scores)
        return row_scores(chunk, scores, self.query_block, self.key_block)
