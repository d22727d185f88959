"""The first layers keep every key, all others the same: no importance is measured at all.

The profile that was published for Qwen2-1.5B is nearly this: two dense layers, and everywhere else 0.128 to 0.172, 0.138 in
the mean.
"""

from dataclasses import dataclass
from typing import ClassVar

from shadowattn.errors import InputError
from shadowattn.offline.allocators.base import Allocator


@dataclass(frozen=True)
class FirstLayersDense(Allocator):
    """`layers` of them, as far as the budget goes: the other layers keep at least `floor` times the mean retention, and what that
    leaves too little of is shared by the first layers."""

    layers: int = 2
    floor: float = 0.25
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self):
        if self.layers < 0 or not 0 < self.floor <= 1:
            raise InputError(
                f"allocator: expected layers ≥ 0 and floor in (0, 1], got layers={self.layers} floor={self.floor}; 2 and 0.25 "
                "are the defaults"
            )

    def allocate(self, head_ppl, layer_ppl, *, base_ppl, retention):
        total, first = len(head_ppl), min(self.layers, len(head_ppl))
        rest = total - first
        if not first or not rest or retention == 1:
            return [[float(retention)] * len(layer) for layer in head_ppl]
        least = self.floor * retention
        dense = min(1.0, (retention * total - least * rest) / first)
        sparse = (retention * total - dense * first) / rest
        return [[dense if index < first else sparse] * len(layer) for index, layer in enumerate(head_ppl)]
