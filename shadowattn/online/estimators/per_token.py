"""Integers of few bits, with a scale of its own for every row and every key."""

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
class PerToken(Estimator):
    """q·(k − offset) of symmetric integers of `bits` bits, 2 to 8. A scale is a row's or a key's own largest magnitude.

    So a row's ranking goes by the row and the keys up to it alone, as no scale measured on a chunk does. `key_offset` is a
    calibrated vector, whose product moves all scores of a row alike.
    """

    bits: int = 4
    key_offset: KeyOffset | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"key_offset"})

    def __post_init__(self):
        checks.fields(self, checks.integer, "bits", least=2, most=8)
        object.__setattr__(self, "key_offset", KeyOffset.read(self.key_offset))

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        of_key = EstimateCost.of(1, 32)  # a scale
        return (
            EstimateCost.of(head_dim, self.bits) + of_key + EstimateCost.quantising(head_dim, keys=keys, offset=self.key_offset)
        )

    def scores(self, chunk: Chunk) -> Tensor:
        q8, q_scales = token_integers(chunk.q.float(), self.bits)
        k8, k_scales = token_integers(shifted(chunk.k, self.key_offset, chunk.layer).float(), self.bits)
        scores = chunk.q.new_empty(*chunk.q.shape[:2], chunk.keys, dtype=torch.float32)
        for group, part in chunk.heads.grouped():
            torch.matmul(q8[part], k8[group].T, out=scores[part])
            scores[part] *= q_scales[part] * k_scales[group].T
        return scores

    def units(self, chunk: Chunk) -> Tensor:
        """A score is in units of q·k."""
        return torch.ones(len(chunk.heads), device=chunk.q.device)


def token_integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x float32 [H, T, D] as integers of ±(2^(bits − 1) − 1), in float32, and the scale of every token, [H, T, 1]."""
    most = 2 ** (bits - 1) - 1
    scales = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * most) / most
    return torch.round(x / scales), scales
