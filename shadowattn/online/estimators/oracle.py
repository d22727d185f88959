"""Exact scores: the upper bound of every estimator, and what C/G-Sparse computes in float (section 2.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.types import Heads


@dataclass(frozen=True)
class Oracle:
    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor, heads: Heads | None = None) -> Tensor:
        heads = heads or Heads.all(q.shape[0], k.shape[0])
        scores = torch.empty(*q.shape[:2], k.shape[1])
        for group, part in heads.grouped():
            torch.matmul(q[part].float(), k[group].float().T, out=scores[part])
        return scores

    def units(self, q: Tensor, k: Tensor, *, layer: int, heads: Heads) -> Tensor:
        """As `Scaled.units`."""
        return torch.ones(len(heads))
