"""Keys whose hash is near the row's: sign-random-projection hashing, as HyperAttention sorts by (arXiv 2310.05869)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.random import Random
from shadowattn.types import EstimateCost

# Of float32's 24 bits the count of so many agreements leaves 12 to what orders the keys that agree as often.
_MOST_BITS = 2**12


@dataclass(frozen=True)
class SignLSH(Estimator):
    """The signs that `bits` random projections give q and k, counted where they agree; keys that agree as often, at random.

    Departures: the paper sorts rows and keys by their hashes and takes the blocks on the sorted diagonal, with sampled keys that
    stand for all others; here every row ranks by the distance of hashes, which is what the sorting approximates, and samples
    fill the rest of the budget without standing for more than themselves. So a row costs as many operations as it sees keys, the
    paper's the logarithm of it; the paper makes attention causal by halving the prompt again and again, here a row sees no key
    after it; and it is exact up to 4096 keys, here at no length.
    """

    bits: int = 7
    seed: int = 0
    scores_are_finite: ClassVar[bool] = True

    def __post_init__(self):
        checks.fields(self, checks.integer, "bits", least=1, most=_MOST_BITS)
        checks.fields(self, checks.integer, "seed")

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(self.bits, 1) + EstimateCost.deriving(2 * head_dim * self.bits, keys=keys)

    def scores(self, chunk: Chunk) -> Tensor:
        scores = Random(self.seed).scores(chunk).mul_(2.0**-24)  # in [0, 1): between two numbers of agreements
        q, k = self.signs(chunk.q), self.signs(chunk.k)
        for group, part in chunk.heads.grouped():
            scores[part] += (q[part] @ k[group].T + self.bits) / 2
        return scores

    def signs(self, x: Tensor) -> Tensor:
        """The hash of x [N, T, D], ±1 in float32 [N, T, bits]."""
        generator = torch.Generator().manual_seed(self.seed)
        projections = torch.randn(self.bits, x.shape[2], dtype=torch.float32, generator=generator).to(x.device)
        projected = x.float() @ projections.T
        return torch.where(projected < 0, -1.0, torch.ones_like(projected))
