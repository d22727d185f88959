"""Exact scores: the upper bound of every estimator, and what C/G-Sparse computes in float (section 2.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Oracle:
    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor) -> Tensor:
        heads, rows, dim = q.shape
        groups, keys, _ = k.shape
        folded = q.float().reshape(groups, heads // groups * rows, dim)
        return torch.bmm(folded, k.float().transpose(1, 2)).view(heads, rows, keys)
