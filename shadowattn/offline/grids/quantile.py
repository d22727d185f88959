"""Quantiles of the observed scales: buckets where the heads are."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shadowattn.errors import InputError
from shadowattn.offline.grids import Grid


@dataclass(frozen=True)
class Quantile(Grid):
    quantiles: Sequence[float] = field(default=(0.25, 0.75, 1.0))

    def __post_init__(self):
        quantiles = list(self.quantiles)
        if not quantiles or quantiles != sorted(set(quantiles)) or quantiles[0] < 0 or quantiles[-1] > 1:
            raise InputError(f"grid.quantiles: expected ascending values in [0, 1], got {quantiles}; 1 clips no head")

    def scales(self, observed: Sequence[float]) -> tuple[float, ...]:
        return tuple(sorted({float(value) for value in np.quantile(np.asarray(observed), list(self.quantiles))}))
