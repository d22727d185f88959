"""Products along the axes in which a head's keys vary most (Loki, arXiv 2406.02542, section 4)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.types import ChannelStatistics, EstimateCost


@dataclass(frozen=True)
class Loki(Estimator):
    """(P q) · (P k), with P the first `dims` principal axes of a head's calibrated keys.

    Departures: the paper decodes, here every row of a prompt ranks; its axes may be of keys before RoPE, here they are of keys
    after it, which are those that are multiplied.
    """

    channels: ChannelStatistics
    dims: int = 16
    needs: ClassVar[frozenset[str]] = frozenset({"channels"})

    def __post_init__(self):
        ChannelStatistics.read(self.channels)
        checks.fields(self, checks.integer, "dims", least=1, most=len(self.channels.k[0][0]), limit="the head dimension")

    @classmethod
    def check_settings(cls, head_dim: int, kv_heads: int, /, *, dims: int = 1, **others: Any) -> None:
        checks.integer("dims", dims, least=1, most=head_dim, limit="the head dimension")

    @property
    def made_for(self) -> str:
        return self.channels.fingerprint

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(self.dims, 32) + EstimateCost.deriving(2 * head_dim * self.dims, keys=keys)

    def scores(self, chunk: Chunk) -> Tensor:
        axes = self.channels.of(chunk.layer, chunk.heads)[2][:, : self.dims].to(chunk.q.device)
        scores = chunk.q.new_empty(*chunk.q.shape[:2], chunk.keys, dtype=torch.float32)
        for group, part in chunk.heads.grouped():
            rotated = chunk.k[group].float() @ axes[group].T
            torch.matmul(chunk.q[part].float() @ axes[group].T, rotated.T, out=scores[part])
        return scores
