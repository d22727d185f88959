"""Exact scores: the upper bound of every estimator, and what C/G-Sparse computes in float (section 2.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.types import EstimateCost


@dataclass(frozen=True)
class Oracle(Estimator):
    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(head_dim, 32)

    def scores(self, chunk: Chunk) -> Tensor:
        scores = torch.empty(*chunk.q.shape[:2], chunk.keys, dtype=torch.float32, device=chunk.q.device)
        for group, part in chunk.heads.grouped():
            torch.matmul(chunk.q[part].float(), chunk.k[group].float().T, out=scores[part])
        return scores

    def units(self, chunk: Chunk) -> Tensor:
        """Scores are q·k itself."""
        return torch.ones(len(chunk.heads), dtype=torch.float32, device=chunk.q.device)
