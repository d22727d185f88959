"""The allocators against each other: is a budget of its own for every head worth more than dense first layers?"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from experiments.lab import Lab
from experiments.part_building import part_name
from experiments.studies.quality import Pair, Quality
from shadowattn.reporting.figures.allocators import draw as draw_allocators
from shadowattn.reporting.rows import Row

# Allocators that do not tell heads apart by what was measured on the model.
RIVALS = ("uniform", "first_layers_dense")


@dataclass(frozen=True)
class Allocators(Quality):
    """A quality study in which each method is compared with those of the same estimator whose allocator measures no head."""

    def pairs(self, lab: Lab, rows: Sequence[Row]) -> dict[Pair, str]:
        return {((name, at), (rival, at)): "" for at in lab.retentions if at < 1 for name, rival in self._rivals(lab)}

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"allocators": draw_allocators(rows)} | super().figures(rows)

    def _rivals(self, lab: Lab) -> list[tuple[str, str]]:
        """Every method with every rival; no pair both ways round."""
        main = part_name(lab.main.estimator)
        allocators = {
            name: part_name(method.allocator) for name, method in lab.methods.items() if part_name(method.estimator) == main
        }
        rivals = [name for kind in RIVALS for name, allocator in allocators.items() if allocator == kind]
        return [
            (name, rival)
            for name in allocators
            for index, rival in enumerate(rivals)
            if name != rival and name not in rivals[:index]
        ]
