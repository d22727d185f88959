"""A mix: one part of the budget by what a head's missing keys cost, the other by what the model loses without the head."""

from dataclasses import dataclass
from typing import ClassVar

from shadowattn.errors import InputError
from shadowattn.offline.allocators.base import Allocator
from shadowattn.offline.allocators.error_greedy import ErrorGreedy
from shadowattn.offline.allocators.waterfill import Waterfill
from shadowattn.types import Sensitivity


@dataclass(frozen=True)
class Mixed(Allocator):
    """`share` of every head's retention is that of `error_greedy` by `measure`, the rest that of `waterfill`; in (0, 1).

    Both meet the mean exactly, and so does the mix.
    """

    share: float = 0.5
    measure: str = "divergence"
    floor: float = 0.25
    sensitivity: Sensitivity | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"importance", "sensitivity"})

    def __post_init__(self):
        if not 0 < self.share < 1:
            raise InputError(f"allocator.share: expected above 0 and below 1, got {self.share}; 0.5 is half of each")
        ErrorGreedy(self.measure)

    def allocate(self, head_ppl, layer_ppl, *, base_ppl, retention):
        how = {"base_ppl": base_ppl, "retention": retention}
        by_cost = ErrorGreedy(self.measure, self.sensitivity).allocate(head_ppl, layer_ppl, **how)
        by_importance = Waterfill(self.floor).allocate(head_ppl, layer_ppl, **how)
        return [
            [self.share * cost + (1 - self.share) * worth for cost, worth in zip(*layers, strict=True)]
            for layers in zip(by_cost, by_importance, strict=True)
        ]
