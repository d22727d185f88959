"""Grids: from observed scales to the few static ones that graphs are built for. One file each.

To add one: a frozen dataclass derived from `Grid` in a file of its own name, and a YAML of that name in `conf/grid/`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar


class Grid(ABC):
    """`pattern` as in `types.ScaleGrid`."""

    pattern: ClassVar[str] = "product"

    @abstractmethod
    def scales(self, observed: Sequence[float]) -> tuple[float, ...]:
        """Ascending static scales, at least one, for the observed scales of Q or of K."""
