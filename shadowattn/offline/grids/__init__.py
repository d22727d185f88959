"""Grids: from observed scales to the few static ones that graphs are built for. One file each.

To add one: a frozen dataclass with a `scales` method in a file of its own name, and a YAML of that name in `conf/grid/`.
"""

from collections.abc import Sequence
from typing import Protocol


class Grid(Protocol):
    def scales(self, observed: Sequence[float]) -> tuple[float, ...]:
        """Ascending static scales, at least one, for the observed scales of Q or of K."""
        ...
