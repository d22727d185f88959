"""The allocators against each other: is a budget of its own for every head worth more than dense first layers?"""

from pathlib import Path

import pandas as pd
from rich.console import Group

from experiments import study
from experiments.comparisons import comparison_rows
from experiments.setup import Setup, part_name
from experiments.stages import Offline
from shadowattn.graphs.bank import GraphBank
from shadowattn.reporting import offline_figures
from shadowattn.reporting.rows import Row

# Allocators that do not tell heads apart by what was measured on the model.
RIVALS = ("uniform", "first_layers_dense")


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[Row]:
    """The rows of a quality study, and what each method gains over those that measure no head, paired window by window."""
    rows = study.measure_cells(setup, offline, bank, folder)
    pairs = [((own, at), (rival, at)) for at in setup.retentions if at < 1 for own, rival in _pairs(setup)]
    return rows + comparison_rows(study.loss_rows(rows), study.cell_losses(setup, folder), pairs)


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """What a quality study draws, and the allocators side by side."""
    study.draw(setup, offline, rows, folder)
    offline_figures.allocators(rows, folder / "allocators.png")


def table(rows: pd.DataFrame, title: str) -> Group:
    """The summary and the verdicts."""
    return study.table(rows, title)


def _pairs(setup: Setup) -> list[tuple[str, str]]:
    """Every method with every rival of the same estimator: a comparison is of allocators alone. No pair both ways round."""
    main = part_name(setup.methods[setup.config.method].estimator)
    allocators = {
        name: part_name(method.allocator) for name, method in setup.methods.items() if part_name(method.estimator) == main
    }
    rivals = [name for kind in RIVALS for name, allocator in allocators.items() if allocator == kind]
    return [
        (name, rival) for name in allocators for index, rival in enumerate(rivals) if name != rival and name not in rivals[:index]
    ]
