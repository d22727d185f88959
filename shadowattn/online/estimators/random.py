"""Keys at random: the floor that every estimator must beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator


@dataclass(frozen=True)
class Random(Estimator):
    """A hash of (seed, layer, head, row, key): the same choice whatever the chunk length or the order of heads."""

    seed: int = 0
    scores_are_finite: ClassVar[bool] = True

    def __post_init__(self):
        object.__setattr__(self, "seed", checks.integer("seed", self.seed))

    def scores(self, chunk: Chunk) -> Tensor:
        head = chunk.heads.ids[:, None, None]
        key = torch.arange(chunk.keys, device=chunk.q.device)[None, None, :]
        state = _mix(_mix(torch.tensor(self.seed) * 1_000_003 + chunk.layer) + head)
        state = _mix(_mix(state + chunk.positions[None, :, None]) + key)
        return (state & 0xFFFFFF).to(torch.float32)  # 24 bits: exact in float32


def _mix(x: Tensor) -> Tensor:
    """One round of the 32-bit finaliser "lowbias32" (multiply and xor-shift), in int64 to keep torch's arithmetic exact."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
