"""A few channels a head, chosen offline (Double Sparsity, arXiv 2408.07092, section 3.1)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.types import ChannelStatistics, EstimateCost


@dataclass(frozen=True)
class DoubleSparsity(Estimator):
    """Σ q_c · k_c over the `kept` channels of a head whose product of mean magnitudes, of q and of k, is largest.

    That product is the mean of |q_c k_c| over all pairs of a row and a key. The same channels serve every row, so that their
    gather is as static as a graph's.
    Departures: the paper decodes, here every row of a prompt ranks; the chosen channels of K are kept as they are, not in 4 bits.
    """

    channels: ChannelStatistics
    kept: int = 16
    needs: ClassVar[frozenset[str]] = frozenset({"channels"})

    def __post_init__(self):
        ChannelStatistics.read(self.channels)
        checks.fields(self, checks.integer, "kept", least=1, most=len(self.channels.k[0][0]), limit="the head dimension")

    @classmethod
    def check_settings(cls, head_dim: int, kv_heads: int, /, *, kept: int = 1, **others: Any) -> None:
        checks.integer("kept", kept, least=1, most=head_dim, limit="the head dimension")

    @property
    def made_for(self) -> str:
        return self.channels.fingerprint

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(self.kept, 32)

    def scores(self, chunk: Chunk) -> Tensor:
        q, k, _ = self.channels.of(chunk.layer, chunk.heads)
        best = (q * k[chunk.heads.kv.cpu()]).sort(dim=1, descending=True, stable=True).indices[:, : self.kept].to(chunk.q.device)
        scores = chunk.q.new_empty(*chunk.q.shape[:2], chunk.keys, dtype=torch.float32)
        for head, group in enumerate(chunk.heads.kv.tolist()):
            torch.matmul(chunk.q[head][:, best[head]].float(), chunk.k[group][:, best[head]].float().T, out=scores[head])
        return scores
