"""SparQ: every row's products over its few largest query channels (arXiv 2312.04985, section 3)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.types import EstimateCost


@dataclass(frozen=True)
class SparQ(Estimator):
    """Σ q_c · k_c over the `channels` channels c where |q_c| is largest, ties to the lower one. Every row of a head has its own.

    Departures: the paper decodes, here every row of a prompt ranks; it sums |q_c| over the query heads of a key head, here each
    head ranks by itself, whichever heads it comes with; its softmax temperature changes no ranking; its mean value for the keys
    left out is not added.
    """

    channels: int = 16

    def __post_init__(self):
        checks.fields(self, checks.integer, "channels", least=1)

    @classmethod
    def check_settings(cls, head_dim: int, kv_heads: int, /, *, channels: int = 1, **others: Any) -> None:
        checks.integer("channels", channels, least=1, most=head_dim, limit="the head dimension")

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(self.channels, 32)

    def scores(self, chunk: Chunk) -> Tensor:
        q, head_dim = chunk.q.float(), chunk.q.shape[2]
        checks.integer("channels", self.channels, least=1, most=head_dim, limit="the head dimension")
        scores = torch.empty(*q.shape[:2], chunk.keys, dtype=torch.float32, device=q.device)
        for group, part in chunk.heads.grouped():
            largest = q[part].abs().sort(dim=-1, descending=True, stable=True).indices[..., : self.channels]
            kept = torch.zeros_like(q[part]).scatter_(-1, largest, 1.0)
            torch.matmul(q[part] * kept, chunk.k[group].float().T, out=scores[part])
        return scores
