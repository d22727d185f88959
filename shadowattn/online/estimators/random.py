"""Keys at random: the floor that every estimator must beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.types import EstimateCost


@dataclass(frozen=True)
class Random(Estimator):
    """A hash of (seed, layer, head, row, key): the same choice whatever the chunk length or the order of heads."""

    seed: int = 0
    scores_are_finite: ClassVar[bool] = True

    def __post_init__(self):
        checks.fields(self, checks.integer, "seed")

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(0, 0)

    def scores(self, chunk: Chunk) -> Tensor:
        head = chunk.heads.ids[:, None, None]
        key = torch.arange(chunk.keys, device=chunk.q.device)[None, None, :]
        state = _mixed(_as_int32(torch.tensor(self.seed * 1_000_003 + chunk.layer)))
        state = _mixed(state.to(head.device) + _as_int32(head))
        state = _mixed(state + _as_int32(chunk.positions[None, :, None]))
        state = _mixed(state + _as_int32(key))
        return state.bitwise_and_(0xFFFFFF).to(torch.float32)  # 24 bits: exact in float32


def _mixed(x: Tensor) -> Tensor:
    """One round of the 32-bit finaliser "lowbias32" (multiply and xor-shift), in place; int32 products wrap, as unsigned ones."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x.bitwise_xor_(_high_bits(x, shift)).mul_(factor)
    return x.bitwise_xor_(_high_bits(x, 16))


def _high_bits(x: Tensor, shift: int) -> Tensor:
    """x >> shift of the bits as an unsigned number."""
    return (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _as_int32(x: Tensor) -> Tensor:
    """The low 32 bits."""
    return ((x + 2**31) % 2**32 - 2**31).to(torch.int32)
