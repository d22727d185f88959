"""Mean × powers of 1/σ: × 0.5, 1 and 2 by default (section 3.3; the artifact's grid)."""

from collections.abc import Sequence
from dataclasses import dataclass

from shadowattn.errors import InputError
from shadowattn.offline.grids import Grid


@dataclass(frozen=True)
class Mean(Grid):
    """`sigma` is the paper's step σ; `steps` how many of them on either side: 1 makes 3 × 3 buckets, 0 a single one.

    σ and 1/σ make the same grid. `pattern` as in `types.ScaleGrid`.
    """

    sigma: float = 0.5
    steps: int = 1
    pattern: str = "product"

    def __post_init__(self):
        if not 0 < self.sigma < float("inf") or self.sigma == 1 or self.steps < 0:
            raise InputError(f"grid: expected sigma above 0 and not 1, and steps ≥ 0, got {self.sigma} and {self.steps}")

    def scales(self, observed: Sequence[float]) -> tuple[float, ...]:
        mean = sum(observed) / len(observed)
        return tuple(sorted(mean * self.sigma**power for power in range(-self.steps, self.steps + 1)))
