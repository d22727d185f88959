"""Importance by racing against the exact method: work, ranks and the retentions that follow, over many orders of the windows.

All windows are measured once by the exact method; every race, each in an order of its own, is then replayed over these losses
(`offline.replay_race`). The same figures are given for looser settings and for a subset of the windows that costs what the races
cost. Work is counted in forward passes of one window without one unit, the unchanged model's included.
The race's defaults were chosen on orders 0 to 23 and 100 to 123 of the bundled model and stories260K; those measured are others.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.lab import Lab
from experiments.part_building import build, part_name
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.offline import Race, rank_correlation, replay_race, summarise
from shadowattn.offline.racing import Allotment
from shadowattn.offline.stability import increases
from shadowattn.reporting.figures.racing import draw as draw_racing
from shadowattn.reporting.rows import Row
from shadowattn.types import AblationLosses, Importance

RANK_TARGET, RETENTION_TARGET, WORK_TARGET = 0.98, 0.03, 1.4
FIGURES = {
    "window_forwards": "windows",
    "times_fewer_forwards": "1",
    "rank_correlation": "1",
    "retention_mean_difference": "1",
    "retention_largest_difference": "1",
}
STATISTICS = {"smallest": np.min, "median": np.median, "largest": np.max}
Compared = Mapping[int, Mapping[str, Mapping[str, float]]]
"""Figures by order and method."""


@dataclass(frozen=True)
class Loose:
    """What of `Race` is looser in the races beside the main ones."""

    first: int = 16
    z: float = 1.0
    tolerance: float = 0.2
    overlap: float = 0.15


@dataclass(frozen=True)
class Racing(Study):
    """`orders` orders of the windows, numbered from `first_order`; `loose`: the settings of the looser races.

    What is raced for is the allocator's budget at the retention; the races' own settings are `importance.race`.
    """

    orders: int = 24
    first_order: int = 200
    loose: Loose = field(default_factory=Loose)
    on_gpu: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "importance", "allocator", "retention")
    headline: ClassVar[tuple[str, ...]] = ("rank_correlation", "times_fewer_forwards", "retention_largest_difference")

    def __post_init__(self):
        check_count("study.orders", self.orders)
        check_count("study.first_order", self.first_order, least=1)  # a row's seed 0 is that of a summary
        self.races(Race(), 0)

    def check(self, lab: Lab) -> None:
        if "sensitivity" in (needs := build(lab.of("allocator")).needs) or "importance" not in needs:
            raise InputError(
                f"allocator: expected one that goes by importance alone, such as waterfill, got {part_name(lab.of('allocator'))}"
            )
        if lab.of("importance").windows == 1:
            raise InputError("importance.windows: expected at least 2 to race over, or 0 for all, got 1")

    def races(self, race: Race, order: int) -> dict[str, Race]:
        """Those compared in one order, by method."""
        return {"racing": replace(race, seed=order), "racing, loose": replace(race, **asdict(self.loose), seed=order)}

    def measure(self, lab: Lab) -> list[Row]:
        exact, settings = lab.offline.losses_by("shared"), lab.of("importance")
        say(f"racing: {len(exact.base)} windows in {self.orders} orders")
        compared = self.compare(exact, lab.offline.allot, Race(**settings.race))
        row = replace(lab.row(), context_tokens=settings.window_tokens, retention=lab.retentions[0])
        row = replace(row, allocator=part_name(lab.of("allocator")))
        rows = [
            replace(
                row, method=method, metric=metric, value=value, unit=FIGURES[metric.rpartition("_")[0]], n=self.orders, seed=0
            )
            for method, values in over_orders(compared).items()
            for metric, value in values.items()
        ]
        return rows + [
            replace(row, method=method, metric=metric, value=float(value), unit=FIGURES[metric], n=1, seed=order)
            for order, methods in compared.items()
            for method, values in methods.items()
            for metric, value in values.items()
        ]

    def compare(self, exact: AblationLosses, allot: Allotment, race: Race) -> Compared:
        """For each order and method, how much work its importance took and how far it is from that of all windows."""
        profile, compared = summarise(exact), {}
        for order in bar(range(self.first_order, self.first_order + self.orders), "race"):
            raced = {name: replay_race(exact, allot, race=one) for name, one in self.races(race, order).items()}
            outcomes = {name: (_forwards(losses), summarise(losses)) for name, losses in raced.items()}
            # So many of the first windows as cost no less than the race.
            whole, windows = _forwards(exact), len(exact.base)
            subset = Race(seed=order).order(windows).tolist()[: -(-outcomes["racing"][0] * windows // whole)]
            outcomes["exact on fewer windows"] = (whole * len(subset) // windows, summarise(exact, windows=subset))
            compared[order] = {name: _figures(*measured, whole, profile, allot) for name, measured in outcomes.items()}
        return compared

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"racing": draw_racing(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """Smallest, median and largest of each figure over the orders; the targets below."""
        summary = rows[rows.seed == 0].set_index(["method", "metric"])
        first = rows.iloc[0]
        table = Table(title=f"{title} · {summary.n.max()} orders, against exact on all windows; retention {first.retention:g}")
        table.add_column("method")
        for heading in ("times fewer forwards", "rank correlation", "retention differs by, mean", "at most"):
            table.add_column(f"{heading}\nsmallest / median / largest", justify="right")
        for method in dict.fromkeys(rows.method):
            values, cells = summary.value[method], []
            for figure, form in zip(list(FIGURES)[1:], (".2f", ".3f", ".4f", ".3f"), strict=True):
                cells.append(" / ".join(f"{values[f'{figure}_{statistic}']:{form}}" for statistic in STATISTICS))
            table.add_row(method, *cells)
        racing = summary.value["racing"]
        targets = {
            f"rank correlation at least {RANK_TARGET:g} in every order": racing["rank_correlation_smallest"] >= RANK_TARGET,
            f"no retention off by more than {RETENTION_TARGET:g} in any order": racing["retention_largest_difference_largest"]
            <= RETENTION_TARGET,
            f"at least {WORK_TARGET:g} times fewer forwards in the median": racing["times_fewer_forwards_median"] >= WORK_TARGET,
        }
        return Group(table, *(f"{'met' if met else 'NOT MET'}: {target}" for target, met in targets.items()))


def over_orders(compared: Compared) -> dict[str, dict[str, float]]:
    """Smallest, median and largest of each figure over the orders, by method."""
    methods = next(iter(compared.values()))
    return {
        method: {
            f"{figure}_{name}": float(statistic([by_method[method][figure] for by_method in compared.values()]))
            for figure in FIGURES
            for name, statistic in STATISTICS.items()
        }
        for method in methods
    }


def _forwards(losses: AblationLosses) -> int:
    """Forward passes of one window, those of the unchanged model included."""
    return losses.window_forwards + len(losses.base)


def _figures(forwards: int, importance: Importance, whole: int, exact: Importance, allot: Allotment) -> dict[str, float]:
    moved = np.abs(np.subtract(allot(importance), allot(exact)))
    return {
        "window_forwards": forwards,
        "times_fewer_forwards": whole / forwards,
        "rank_correlation": rank_correlation(increases(importance), increases(exact)),
        "retention_mean_difference": float(moved.mean()),
        "retention_largest_difference": float(moved.max()),
    }
