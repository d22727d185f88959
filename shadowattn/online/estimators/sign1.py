"""Keys of one bit a channel, the query in full (arXiv 2609.13205, of which only the abstract was at hand)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.graphs.symmetric_int8 import shifted
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.types import EstimateCost, KeyOffset


@dataclass(frozen=True)
class Sign1(Estimator):
    """(R q) · sign(R (k − offset)) × mean |R (k − offset)|, with R a Hadamard rotation: a bit a channel and a scale a key.

    `rotate` spreads channels of large values over all, and `scaled` keeps each key's magnitude; `key_offset` is a calibrated
    vector, whose product moves all scores of a row alike. The definition is ours.
    """

    rotate: bool = True
    scaled: bool = True
    key_offset: KeyOffset | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"key_offset"})

    def __post_init__(self):
        checks.fields(self, checks.flag, "rotate", "scaled")
        object.__setattr__(self, "key_offset", KeyOffset.read(self.key_offset))

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        """With a scale for each key."""
        rotations = 2 * head_dim * math.log2(head_dim & -head_dim) * self.rotate
        of_key = head_dim * (self.scaled + (self.key_offset is not None))  # its mean magnitude, and less the offset
        return EstimateCost.of(head_dim + 32 * self.scaled, 1) + EstimateCost.deriving(rotations + of_key, keys=keys)

    def scores(self, chunk: Chunk) -> Tensor:
        q = chunk.q.float()
        scores = torch.empty(*q.shape[:2], chunk.keys, dtype=torch.float32, device=q.device)
        for group, part in chunk.heads.grouped():
            k = shifted(chunk.k, self.key_offset, chunk.layer, slice(group, group + 1))[0].float()
            rotated = hadamard(k) if self.rotate else k
            signs = torch.where(rotated < 0, -1.0, torch.ones_like(rotated))
            if self.scaled:
                signs *= rotated.abs().mean(1, keepdim=True)
            torch.matmul(hadamard(q[part]) if self.rotate else q[part], signs.T, out=scores[part])
        return scores


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] rotated: the orthonormal Walsh-Hadamard transform of the largest power of two that divides D, block by block."""
    block = x.shape[-1] & -x.shape[-1]
    parts = x.unflatten(-1, (-1, block))
    half = 1
    while half < block:
        first, second = parts.unflatten(-1, (-1, 2, half)).unbind(-2)
        parts = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return parts.flatten(-2) * block**-0.5
