"""The paper's formula (section 3.2): retention in proportion to head importance × layer importance, clamped.

importance_h = loss with head h zeroed − loss,  importance_l = loss with layer l bypassed − loss
retention_h = r · N · clamp(importance_h · importance_l) / Σ clamp(…)
"""

import math
from dataclasses import dataclass

from shadowattn.errors import InputError
from shadowattn.offline.allocators.base import Allocator

# Smallest share of the clamp that a head's importance is taken for: ablating a head may lower the loss, and a
# retention must be positive. The paper does not say what it does then.
_FLOOR = 1e-6


@dataclass(frozen=True)
class Paper(Allocator):
    """`clamp` is printed as 1e-3, next to losses of 60 to 100, and cannot be meant so: nearly every head then gets the same.

    The "losses" that the paper plots, 60 to over 100, can only be perplexities: `metric: perplexity` takes differences of those.
    The formula may exceed 1 for a head. A head cannot keep more than every key, so it is capped, and the mean then
    falls short of `retention`; the paper says nothing of it, `waterfill` repairs it.
    """

    clamp: float = 1e-3
    metric: str = "loss"

    def __post_init__(self):
        if self.metric not in ("loss", "perplexity") or not 0 < self.clamp < math.inf:
            raise InputError(
                f"allocator: expected metric loss or perplexity and a positive clamp, got {self.metric!r} and {self.clamp}; "
                "loss and 1e-3 are the paper's"
            )

    def allocate(self, head_ppl, layer_ppl, *, base_ppl, retention):
        measure = math.log if self.metric == "loss" else float
        base = measure(base_ppl)
        importance = [
            [min(max((measure(head) - base) * (measure(layer) - base), _FLOOR * self.clamp), self.clamp) for head in heads]
            for heads, layer in zip(head_ppl, layer_ppl, strict=True)
        ]
        total = sum(value for layer in importance for value in layer)
        count = sum(len(layer) for layer in importance)
        return [[min(1.0, retention * count * value / total) for value in layer] for layer in importance]
