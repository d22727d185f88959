"""A small trained scorer, one list for all heads of a layer (DeepSeek's lightning indexer, arXiv 2512.02556, section 2.1)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.types import EstimateCost, IndexerWeights


@dataclass(frozen=True)
class LightningIndexer(Estimator):
    """Σ over `heads` indexer heads of w · ReLU(q_I · k_I), of `dims` dimensions each, with one normalised key for all of them.

    q_I and the weights w are linear in the queries of all heads of a row, k_I in those of all key heads: `indexer` holds the
    matrices, which `offline.indexers.train_indexer` fits to what the heads attend to together.
    Departures: w has a bias and no factor heads^-½ · dims^-½, which changes no ranking, and the normalised key no gain and bias
    of its own; it is trained on 64 sampled rows of each chunk (`offline.indexers`). The paper's indexer reads the layer's
    input, and rotates a part of its own queries and keys by position; here it reads the layer's queries and keys, which are
    rotated already. The paper's products are of 8 bits after a Hadamard rotation, here of floats, and its model is trained on
    with the chosen keys, here it is left as it is.
    """

    indexer: IndexerWeights
    heads: int = 4
    dims: int = 32
    needs: ClassVar[frozenset[str]] = frozenset({"indexer"})
    granularity: ClassVar[str] = "layer"

    def __post_init__(self):
        IndexerWeights.read(self.indexer)
        for name in ("heads", "dims"):
            value, trained = checks.integer(name, getattr(self, name), least=1), getattr(self.indexer, name)
            if value != trained:
                raise InputError(f"{name}: expected the {trained} that the indexer was trained with, got {value}")

    @classmethod
    def check_settings(cls, head_dim: int, kv_heads: int, /, *, heads: int = 1, dims: int = 1, **others: Any) -> None:
        checks.integer("heads", heads, least=1)
        most = kv_heads * head_dim
        checks.integer("dims", dims, least=1, most=most, limit="the dimensions of a layer's keys together")

    @property
    def made_for(self) -> str:
        return self.indexer.fingerprint

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        """A head's share of what all heads of the layer have together."""
        of_row, of_key = len(self.indexer.q[0][0][0]), len(self.indexer.k[0][0])  # H·D and G·D
        sharing = of_row / head_dim
        ranking = EstimateCost(self.heads * self.dims * 32 / sharing, self.dims * 4 / sharing)
        gated = EstimateCost.adding(2 * self.heads / sharing)  # ReLU and w
        derived = of_row * (self.heads * self.dims + self.heads) + of_key * self.dims + 4 * self.dims  # mean and variance 1
        return ranking + gated + EstimateCost.deriving(derived / sharing, keys=keys)

    def scores(self, chunk: Chunk) -> Tensor:
        q, k, gate = self.indexer.of(chunk.layer, chunk.layer_q, chunk.k)
        return indexer_scores(beside(chunk.layer_q), indexer_keys(beside(chunk.k), k), q, gate)[None]


def beside(x: Tensor) -> Tensor:
    """Heads [H, T, D] beside one another, float32 [T, H·D]."""
    return x.transpose(0, 1).flatten(1).float()


def indexer_keys(keys: Tensor, k: Tensor) -> Tensor:
    """The indexer's keys [K, E] of a layer's keys [K, G·D], each with mean 0 and variance 1, by `k` [E, G·D]."""
    made = keys @ k.T
    return layer_norm(made, made.shape[-1:])


def indexer_scores(queries: Tensor, keys: Tensor, q: Tensor, gate: Tensor) -> Tensor:
    """Scores [Q, K] of a layer's queries [Q, H·D] and the indexer's keys [K, E], by `q` [M, E, H·D] and `gate` [M, H·D + 1]."""
    weights = queries @ gate[:, :-1].T + gate[:, -1]
    scores = queries.new_zeros(len(queries), len(keys))
    for head in range(len(q)):
        scores = scores + weights[:, head, None] * torch.relu(queries @ q[head].T @ keys.T)
    return scores
