"""The allocators against each other: is a budget of its own for every head worth more than dense first layers?"""

from pathlib import Path

import pandas as pd
from rich.console import Group

from experiments import study
from experiments.setup import Setup
from experiments.stages import Offline
from experiments.study import measure
from shadowattn.reporting import offline_figures, tables, verdicts

__all__ = ["draw", "measure", "table"]


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """What a quality study draws, and the allocators side by side."""
    study.draw(setup, offline, rows, folder)
    offline_figures.allocators(rows, folder / "allocators.png")


def table(rows: pd.DataFrame, title: str) -> Group:
    """The summary and the verdict."""
    return Group(tables.summary_table(rows, title), verdicts.head_budgets(rows))
