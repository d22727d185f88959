"""The paper's idea without its gaps: in proportion to importance, capped at 1, the mean met exactly.

Importance is the product of the loss increases, as in the paper. What capped heads cannot use raises all others by the
same factor, as water finds its level.
"""

import math
from dataclasses import dataclass

from shadowattn.offline.allocators.base import Allocator


@dataclass(frozen=True)
class Waterfill(Allocator):
    """`floor` is the least that a head keeps, as a share of the mean retention: ablation on a little text ranks the
    unimportant heads by noise, and starving one of them to nothing rests on that noise."""

    floor: float = 0.25

    def allocate(self, head_ppl, layer_ppl, *, base_ppl, retention):
        base = math.log(base_ppl)
        importance = [
            max(math.log(head) - base, 0.0) * max(math.log(layer) - base, 0.0)
            for row, layer in zip(head_ppl, layer_ppl, strict=True)
            for head in row
        ]
        heads = len(head_ppl[0])
        retentions = fill(importance, retention, max(self.floor, 1e-6) * retention)
        return [retentions[start : start + heads] for start in range(0, len(retentions), heads)]


def fill(importance: list[float], mean: float, floor: float) -> list[float]:
    """min(1, max(floor, level · importance)) with the level that makes the mean come out, as floats."""
    count, target = len(importance), mean * len(importance)
    if mean == 1:
        return [1.0] * count

    def poured(level: float) -> list[float]:
        return [min(1.0, max(floor, level * value)) for value in importance]

    low, high = 0.0, 1.0 / min((value for value in importance if value > 0), default=1.0)
    if sum(poured(high)) < target:  # the heads of no importance must take the rest, evenly
        capped = sum(value > 0 for value in importance)
        rest = (target - capped) / (count - capped)
        return [1.0 if value > 0 else min(1.0, max(floor, rest)) for value in importance]
    for _ in range(200):
        level = (low + high) / 2
        if level in (low, high):
            break
        low, high = (level, high) if sum(poured(level)) < target else (low, level)
    return poured(high)
