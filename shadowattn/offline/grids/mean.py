"""Mean × powers of 1/σ: × 0.5, 1 and 2 by default (section 3.3; the artifact's grid)."""

from collections.abc import Sequence
from dataclasses import dataclass

from shadowattn.errors import InputError


@dataclass(frozen=True)
class Mean:
    """`sigma` is the paper's step σ; `steps` how many of them on either side: 1 makes 3 × 3 buckets, 0 a single one."""

    sigma: float = 0.5
    steps: int = 1

    def __post_init__(self):
        if not 0 < self.sigma < 1 or self.steps < 0:
            raise InputError(f"grid: expected sigma in (0, 1) and steps ≥ 0, got {self.sigma} and {self.steps}")

    def scales(self, observed: Sequence[float]) -> tuple[float, ...]:
        mean = sum(observed) / len(observed)
        return tuple(mean * self.sigma**-power for power in range(-self.steps, self.steps + 1))
