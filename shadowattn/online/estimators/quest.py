"""Quest: pages of keys, each by the most that a key within its bounds could score (arXiv 2406.10774, section 3.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.pages import MOST_KEYS, Pages, page_scores
from shadowattn.types import EstimateCost


class Bounds(Pages):
    """The lowest and the highest value of every page and dimension, each [G, P, D]."""

    def sum_up(self, k: Tensor, whole: int) -> tuple[Tensor, Tensor]:
        rest = -k.shape[1] % self.page
        bounds = []
        for fill, extreme in ((torch.inf, torch.amin), (-torch.inf, torch.amax)):
            pages = torch.nn.functional.pad(k, (0, 0, 0, rest), value=fill).unflatten(1, (-1, self.page))
            bounds.append(extreme(pages, 2))
        return bounds[0], bounds[1]


@dataclass(frozen=True)
class Quest(Estimator):
    """A page of `page` keys scores Σ_c max(q_c · max_c, q_c · min_c), and so does each of its keys.

    Departures: the paper decodes, here every row of a prompt ranks; a row's own page is always kept; the paper leaves the first
    two layers dense, here retention decides.
    """

    page: int = 16

    def __post_init__(self):
        checks.fields(self, checks.integer, "page", least=1, most=MOST_KEYS)

    @property
    def ranked_together(self) -> tuple[int, int]:
        return 1, self.page

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(2 * head_dim / self.page, 32) + EstimateCost.deriving(4 * head_dim, keys=keys)

    def scores(self, chunk: Chunk) -> Tensor:
        low, high = chunk.cache.derived(f"bounds of {self.page} keys", lambda: Bounds(self.page), chunk.k).figures
        q, kv = chunk.q.float(), chunk.heads.kv
        return page_scores(chunk, q.clamp(min=0) @ high[kv].mT + q.clamp(max=0) @ low[kv].mT, self.page)
