"""Schedulers against the optimum: how much longer their order takes, on measured and on random costs, and how long they plan."""

import inspect
import math
import random
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from experiments.lab import Lab
from experiments.part_building import build, part_name
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.latency import LatencyStudy
from shadowattn.errors import InputError
from shadowattn.online.latency import LatencyProfile
from shadowattn.online.makespan import MACHINES, makespan
from shadowattn.online.plan import Group, Launch, Work
from shadowattn.online.schedulers import Scheduler
from shadowattn.online.schedulers.optimal import Optimal
from shadowattn.plugins import parts_of
from shadowattn.reporting.figures.schedulers import draw as draw_schedulers
from shadowattn.reporting.rows import Row

COSTS = ("measured", "random")


@dataclass(frozen=True)
class SchedulerRow(Row):
    """A row about a scheduler on works of `heads` heads, whose costs are `measured` ones of this machine or `random`."""

    heads: int = 0
    machines: int = 3
    costs: str = ""


@dataclass(frozen=True)
class RandomCosts:
    """Random works: `launch_us` of launches of 1, 2, 3 and 4 heads (the paper's 2, 3 and 4 ms for 1, 2 and 4), and retentions of
    heads between `least_retention` and `largest_retention`.

    Selection costs `fixed_select` plus the retention of a head, attention the retention; the totals of both are the estimate's
    times a factor between 1 / `imbalance` and `imbalance`.
    """

    launch_us: list[float] = field(default_factory=lambda: [2000.0, 3000.0, 3500.0, 4000.0])
    least_retention: float = 0.05
    largest_retention: float = 0.5
    fixed_select: float = 0.15
    imbalance: float = 2.0

    def __post_init__(self):
        if len(self.launch_us) != 4 or not all(0 < us < math.inf for us in self.launch_us):
            raise InputError(f"study.random.launch_us: expected four times, of 1 to 4 heads, got {self.launch_us}")
        if not 0 < self.least_retention <= self.largest_retention <= 1:
            limits = f"{self.least_retention:g} and {self.largest_retention:g}"
            raise InputError(f"study.random: expected retentions in (0, 1], the least first, got {limits}")
        if not self.fixed_select >= 0 or not self.imbalance >= 1:
            raise InputError("study.random: expected fixed_select of at least 0 and imbalance of at least 1")


@dataclass(frozen=True)
class Schedulers(LatencyStudy):
    """Every scheduler there is, and the chosen one with its settings.

    `works` works for each number of `heads`, kind of costs and number of machines; the optimum of each is searched for `limit_s`
    seconds, and a plan timed `repeats_of_plan` times.
    """

    works: int = 12
    limit_s: float = 5.0
    heads: list[int] = field(default_factory=lambda: [4, 8, 12, 16, 24, 32])
    repeats_of_plan: int = 5
    random: RandomCosts = field(default_factory=RandomCosts)

    headline: ClassVar[tuple[str, ...]] = ("gap_median", "gap_worst", "planning_time")

    def __post_init__(self):
        super().__post_init__()
        check_count("study.works", self.works)
        check_count("study.repeats_of_plan", self.repeats_of_plan)
        if not self.heads or min(self.heads) < 1:
            raise InputError(f"study.heads: expected numbers of heads, at least one, got {self.heads}")
        if not self.limit_s > 0:
            raise InputError(f"study.limit_s: expected a time above 0 s, got {self.limit_s:g}")

    def check(self, lab: Lab) -> None:
        super().check(lab)
        if part_name(lab.of("scheduler")) == "optimal":
            raise InputError(
                "scheduler: expected one to hold to the optimum, got the optimum itself; leave scheduler out, and set "
                "study.limit_s=SECONDS for how long the optimum is searched"
            )

    def measure(self, lab: Lab) -> list[SchedulerRow]:
        """Rows of every scheduler for each number of heads, machines and kind of costs; finished cells are not measured again."""
        units, (profile, _) = lab.units("cells"), self.measure_profile(lab)
        cells = [(costs, heads, machines) for costs in COSTS for heads in self.heads for machines in MACHINES]
        say(f"schedulers: {len(cells)} kinds of work, {self.works} works each, the optimum within {self.limit_s:g} s")
        rows = []
        for costs, heads, machines in bar(cells, "schedule"):
            measured = units.get(
                f"{costs}-{heads}-{machines}",
                lambda costs=costs, heads=heads, machines=machines: self._cell(lab, profile, costs, heads, machines),
            )
            row = replace(lab.row(SchedulerRow), heads=heads, machines=machines, costs=costs)
            rows += self._rows(row, measured)
        return rows

    def _cell(self, lab: Lab, profile: LatencyProfile, costs: str, heads: int, machines: int) -> dict:
        """Gap to the bound and planning time, per scheduler and work; and how many optima were proven."""
        draw, candidates = random.Random(f"{lab.seed} {costs} {heads}"), schedulers(lab.of("scheduler"), machines)
        figures = {name: {"gap": [], "us": []} for name in candidates}
        proven, best = 0, []
        for _ in range(self.works):
            work = random_work(draw, heads, self.random) if costs == "random" else measured_work(draw, profile, heads)
            solution = Optimal(machines, limit_s=self.limit_s).solve(work)
            proven += solution.proven
            best.append(solution.makespan_us / solution.bound_us - 1)
            for name, scheduler in candidates.items():
                seconds = []
                for _ in range(self.repeats_of_plan):
                    start = time.perf_counter()
                    plan = scheduler.plan(work)
                    seconds.append(time.perf_counter() - start)
                figures[name]["gap"].append(makespan(work, plan, machines=machines) / solution.bound_us - 1)
                figures[name]["us"].append(statistics.median(seconds) * 1e6)
        return figures | {"optimal": {"gap": best, "us": [], "proven": proven}}

    def _rows(self, row: SchedulerRow, measured: dict) -> list[SchedulerRow]:
        row = replace(
            row, path_kind="timing", n=self.works, corpus_sha256="", measured="simulated",
            data="latencies of this machine" if row.costs == "measured" else "random costs",
        )  # fmt: skip
        proven = measured["optimal"]["proven"] / self.works
        flag = "" if proven == 1 else f"bound, not optimum, in {1 - proven:.0%} of the works"
        rows = [replace(row, method="optimal", metric="proven", value=proven)]
        for name, values in measured.items():
            scheduler_row = replace(row, method=name, flag=flag)
            rows.append(replace(scheduler_row, metric="gap_median", value=statistics.median(values["gap"])))
            rows.append(replace(scheduler_row, metric="gap_worst", value=max(values["gap"])))
            if values["us"]:
                timed = replace(scheduler_row, metric="planning_time", value=statistics.median(values["us"]), unit="us", flag="")
                rows.append(replace(timed, measured="measured"))
        return rows

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"schedulers": draw_schedulers(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """Each scheduler on each kind of work: the gap's median and worst over all works of that many heads."""
        counts = sorted(rows.heads.unique())
        table = Table("scheduler", "machines", "costs", *(f"{heads} heads" for heads in counts), "µs, 16 heads", title=title)
        for (machines, costs, name), cell in rows.groupby(["machines", "costs", "method"], sort=False):
            values = {metric: part.set_index("heads").value for metric, part in cell.groupby("metric")}
            gaps = (f"{values['gap_median'][h]:.1%}, {values['gap_worst'][h]:.1%}" for h in counts)
            planned = f"{values['planning_time'][16]:.0f}" if "planning_time" in values and 16 in counts else ""
            table.add_row(name, str(machines), costs, *gaps, planned)
        return table


def schedulers(chosen: DictConfig, machines: int) -> dict[str, Scheduler]:
    """All but the optimum, by name, and the `chosen` one with its settings; for so many machines where one asks for them."""
    kinds = parts_of("shadowattn.online.schedulers", Scheduler)
    parts = {name: kind(**_machines(inspect.signature(kind).parameters, machines)) for name, kind in kinds.items()}
    parts[part_name(chosen)] = build(OmegaConf.merge(chosen, _machines(chosen, machines)))
    return {name: part for name, part in parts.items() if not isinstance(part, Optimal)}


def _machines(settings: Collection[str], machines: int) -> dict[str, int]:
    return {"machines": machines} if "machines" in settings else {}


def random_work(draw: random.Random, heads: int, random_costs: RandomCosts) -> Work:
    """Launches of one to four heads, and what selection and attention of each head take."""
    groups = _groups(draw, heads, (1, 2, 4))
    launch_us = dict(enumerate(random_costs.launch_us, start=1))
    total = sum(launch_us[len(group)] for group in groups)
    retention = [draw.uniform(random_costs.least_retention, random_costs.largest_retention) for _ in range(heads)]
    select = [random_costs.fixed_select + r for r in retention]
    scales = [
        total * draw.uniform(1 / random_costs.imbalance, random_costs.imbalance) / sum(costs) for costs in (select, retention)
    ]
    return Work(
        tuple(Launch(group, launch_us[len(group)]) for group in groups),
        tuple(scales[0] * cost for cost in select),
        tuple(scales[1] * cost for cost in retention),
    )


def measured_work(draw: random.Random, profile: LatencyProfile, heads: int) -> Work:
    """A layer of that many heads at this machine's latencies: random buckets, retentions and length, within what was measured."""
    buckets = sorted({point.bucket for point in profile.points if point.stage == "estimate"})
    sizes = sorted({point.heads for point in profile.points if point.stage == "estimate"})
    retentions = [point.retention for point in profile.points if point.stage == "attend"]
    lengths = sorted({point.keys for point in profile.points})
    groups = [Group(heads_of, draw.choice(buckets)) for heads_of in _groups(draw, heads, sizes)]
    return profile.work(
        groups, [draw.uniform(min(retentions), max(retentions)) for _ in range(heads)], keys=draw.randint(lengths[0], lengths[-1])
    )


def _groups(draw: random.Random, heads: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    left = list(range(heads))
    draw.shuffle(left)
    groups = []
    while left:
        size = min(len(left), draw.choice(list(sizes)))
        groups.append(tuple(left[:size]))
        left = left[size:]
    return groups
