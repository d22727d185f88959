"""Calibrations: the INT8 scale that suits some rows of Q or K. One file each.

To add one: a frozen dataclass with a `scales` method in a file of its own name, and a YAML of that name in `conf/calibration/`.
"""

from typing import Protocol

from torch import Tensor


class Calibration(Protocol):
    def scales(self, x: Tensor) -> Tensor:
        """The real value of one integer step for each head, float32 [heads], positive, for x [heads, rows, D]."""
        ...
