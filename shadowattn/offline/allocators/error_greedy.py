"""Budget goes where it lowers a measured cost most: on calibration data, for each head at several retentions.

Importance by ablation says what a model loses without a head; this, what it loses when the head keeps fewer keys. A head
can be vital and yet need a handful of keys.
"""

from dataclasses import dataclass
from typing import ClassVar

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.offline.allocators.base import Allocator
from shadowattn.types import MEASURES, Sensitivity


@dataclass(frozen=True)
class ErrorGreedy(Allocator):
    """`measure` names what `sensitivity` has to be of: `divergence`, `error` or `loss`, as `offline.sensitivity` defines them.

    Each head's cost is taken for its lower convex hull over retention, so that taking the steepest step first is the
    optimum; steps of equal gain are taken together, in equal parts. The mean is met exactly.
    """

    measure: str = "divergence"
    sensitivity: Sensitivity | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"sensitivity"})

    def __post_init__(self):
        checks.one_of("allocator.measure", self.measure, MEASURES)

    def allocate(self, head_ppl, layer_ppl, *, base_ppl, retention):
        if self.sensitivity is None:
            raise InputError(
                "allocator error_greedy: expected a measured sensitivity, got none; measure one with "
                "shadowattn.offline.measure_sensitivity and give ErrorGreedy(sensitivity=…)"
            )
        cost = [head for layer in self.sensitivity.cost for head in layer]
        heads = len(head_ppl[0])
        if len(cost) != heads * len(head_ppl):
            raise InputError(
                f"sensitivity: expected one for each of {heads * len(head_ppl)} heads, got {len(cost)}; measure it for this model"
            )
        retentions = spend(self.sensitivity.retentions, cost, retention)
        return [retentions[start : start + heads] for start in range(0, len(retentions), heads)]


def spend(grid: tuple[float, ...], cost: list[tuple[float, ...]], mean: float) -> list[float]:
    """Retentions of the given mean that make the sum of the hulls of `cost[head][i]` at `grid[i]` least."""
    least = min(grid[0], mean)
    steps = sorted(
        ((gain, head, width) for head, values in enumerate(cost) for gain, width in _hull_steps(grid, values)),
        key=lambda step: -step[0],
    )
    retentions = [least] * len(cost)
    budget = (mean - least) * len(cost)
    at = 0
    while at < len(steps) and budget > 0:
        level = [step for step in steps[at:] if step[0] == steps[at][0]]
        at += len(level)
        share = min(1.0, budget / sum(width for _, _, width in level))
        for _, head, width in level:
            retentions[head] += share * width
        budget -= share * sum(width for _, _, width in level)
    return [min(1.0, value) for value in retentions]


def _hull_steps(grid: tuple[float, ...], values: tuple[float, ...]) -> list[tuple[float, float]]:
    """(gain for each unit of retention, width) of each piece of the lower convex hull, from the left."""
    hull: list[tuple[float, float]] = []
    for point in zip(grid, values, strict=True):
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return [((y0 - y1) / (x1 - x0), x1 - x0) for (x0, y0), (x1, y1) in zip(hull, hull[1:], strict=False)]


def _above(left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether the middle point lies on or above the line between the others."""
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (middle[0] - left[0])
