"""The allocators against each other: is a budget of its own for every head worth more than dense first layers?"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Group

from experiments import study
from experiments.setup import Setup, part_name
from experiments.stages import Offline
from experiments.study import cell_key
from shadowattn.artifacts import Units
from shadowattn.graphs.bank import GraphBank
from shadowattn.reporting import offline_figures, tables, verdicts
from shadowattn.reporting.rows import Row


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[Row]:
    """The rows of a quality study, and what each method gains over those that measure no head, paired window by window."""
    rows = study.measure(setup, offline, bank, folder)
    return rows + list(_gains(setup, rows, Units(folder / "cells")))


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """What a quality study draws, and the allocators side by side."""
    study.draw(setup, offline, rows, folder)
    offline_figures.allocators(rows, folder / "allocators.png")


def table(rows: pd.DataFrame, title: str) -> Group:
    """The summary and the verdict."""
    return Group(tables.summary_table(rows, title), verdicts.head_budgets(rows))


def _gains(setup: Setup, rows: list[Row], units: Units) -> Iterator[Row]:
    rivals = [name for name, method in setup.methods.items() if part_name(method.allocator) in verdicts.RIVALS]
    for row in [row for row in rows if row.metric == "loss_increase"]:
        for rival in rivals:
            if row.method != rival:
                own, other = (units.read(cell_key(name, row.retention))["window_losses"] for name in (row.method, rival))
                gains = np.subtract(other, own)
                error = gains.std(ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else math.nan
                common = replace(row, n=len(gains), flag="", unit="nat")
                yield replace(common, metric=f"gain_over_{rival}", value=float(gains.mean()))
                yield replace(common, metric=f"gain_over_{rival}_error", value=float(error))
