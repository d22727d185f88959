"""Products of 4 bits, of which means are taken off first (SALE, arXiv 2505.24179, section 3.2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.blocks import mean_rows, row_blocks
from shadowattn.online.estimators.per_token import token_integers
from shadowattn.types import EstimateCost


@dataclass(frozen=True)
class Sale(Estimator):
    """(q − q̄) · (k − k̄) of 4-bit integers, a scale for each row and each key, plus q̄ · (k − k̄) in full.

    q̄ is the mean query of the row's block of `query_block` rows, k̄ the mean of all keys so far, those of the chunk's later rows
    included. The product of a row with k̄ is left out: it moves all scores of the row alike.
    Departures: the paper keeps a block of 64 rows × 32 keys in which any row's score exceeds a share, calibrated for each head,
    of what its sinks and its last 128 keys get, and always keeps those sinks and those 128; here every row keeps as many keys as
    its budget says, and nothing is kept in any case (`selection.sinks` and `selection.recent` do so for any estimator).
    """

    query_block: int = 64
    sees: ClassVar[str] = "chunk"

    def __post_init__(self):
        checks.fields(self, checks.integer, "query_block", least=1)

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        of_means = EstimateCost.of(head_dim / min(self.query_block, rows), 32) + EstimateCost.adding(1)
        means = EstimateCost.deriving(4 * head_dim, keys=keys)  # both, and less them
        of_key = EstimateCost.of(1, 32)  # a scale
        return EstimateCost.of(head_dim, 4) + of_key + of_means + EstimateCost.quantising(head_dim, keys=keys) + means

    def scores(self, chunk: Chunk) -> Tensor:
        of_row, _ = row_blocks(chunk, self.query_block)
        means = mean_rows(chunk, self.query_block)
        k = chunk.once("keys less their mean", lambda: chunk.k.float() - chunk.k.float().mean(1, keepdim=True))
        k8, k_scales = chunk.once("4-bit keys less their mean", lambda: token_integers(k, 4))
        q8, q_scales = token_integers(chunk.q.float() - means[:, of_row], 4)
        scores = chunk.q.new_empty(*chunk.q.shape[:2], chunk.keys, dtype=torch.float32)
        for group, part in chunk.heads.grouped():
            torch.matmul(q8[part], k8[group].T, out=scores[part])
            scores[part] *= q_scales[part] * k_scales[group].T
            scores[part] += (means[part] @ k[group].T)[:, of_row]
        return scores
