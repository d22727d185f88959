"""Pages of keys by their mean key: what block-sparse methods pool (MInference's block pattern, arXiv 2407.02490)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.pages import MOST_KEYS, Pages, page_scores
from shadowattn.types import EstimateCost


class Means(Pages):
    """The mean key of every page, [G, P, D]."""

    def sum_up(self, k: Tensor, whole: int) -> tuple[Tensor]:
        full, rest = k.split([whole * self.page, k.shape[1] - whole * self.page], 1)
        means = full.unflatten(1, (whole, self.page)).mean(2)
        return (torch.cat([means, rest.mean(1, keepdim=True)], 1) if rest.shape[1] else means,)


@dataclass(frozen=True)
class MeanKeys(Estimator):
    """A page of `page` keys scores q · k̄, and so does each of its keys.

    Departures: queries are not pooled unless rows share lists (`selection.query_block`, with `block_score=pooled_query`: then Q
    and K are both pooled, as in the paper); a row's own page is always kept.
    """

    page: int = 64

    def __post_init__(self):
        checks.fields(self, checks.integer, "page", least=1, most=MOST_KEYS)

    @property
    def ranked_together(self) -> tuple[int, int]:
        return 1, self.page

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(head_dim / self.page, 32) + EstimateCost.deriving(head_dim, keys=keys)

    def scores(self, chunk: Chunk) -> Tensor:
        (means,) = chunk.cache.derived(f"means of {self.page} keys", lambda: Means(self.page), chunk.k).figures
        return page_scores(chunk, chunk.q.float() @ means[chunk.heads.kv].mT, self.page)
