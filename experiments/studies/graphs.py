"""The graph bank measured: what building, loading and calling it costs, what padding the planner saves, how fast each form is."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from experiments.lab import Lab
from experiments.own_process import check_memory
from experiments.progress import bar, say
from experiments.refusals import check_choice, check_count
from experiments.studies.base import Study
from experiments.studies.graph_banks import SHAPES, UNITS, Recipe, counts, measure_bank
from experiments.studies.graph_forms import BASELINE, measure_forms
from shadowattn.devices import survey
from shadowattn.graphs.planner import POLICIES, chunk_lengths, plan_capacities
from shadowattn.interleave import Timing, ratio
from shadowattn.reporting.figures.graphs import OWN_BANK as OWN
from shadowattn.reporting.figures.graphs import draw as draw_graphs
from shadowattn.reporting.rows import Row

# The bank that a run with this configuration builds.


@dataclass(frozen=True)
class GraphRow(Row):
    """A row about a plan of shapes, or about none."""

    shapes: int = 0


@dataclass(frozen=True)
class Graphs(Study):
    """This run's bank, banks of four models' shapes, plans for prompts of any length, and one launch in every form.

    Banks and launches are of `rows` query rows; banks on each of `bank_keys` keys, 9 buckets and 2 launch sizes, every phase
    `times` times with `calls` calls; launches of the models `form_shapes` on `form_keys` keys, `form_rounds` rounds. Plans are
    for `prompts` prompts of 1 to `longest` tokens, with at most each of `limits` shapes.
    """

    bank_shapes: list[str] = field(default_factory=lambda: ["qwen2_0_5b", "qwen2_1_5b", "phonelm_0_5b", "phonelm_1_5b"])
    bank_keys: list[int] = field(default_factory=lambda: [1024, 2048, 4096])
    calls: int = 2000
    times: int = 3
    form_shapes: list[str] = field(default_factory=lambda: ["qwen2_1_5b", "phonelm_0_5b"])
    form_keys: int = 4096
    form_rounds: int = 15
    rows: int = 256
    limits: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    prompts: int = 500
    longest: int = 4096
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "calibration", "key_offset", "grid", "graphs", "threads"),
    )
    headline: ClassVar[tuple[str, ...]] = ("call_us", "build_and_compile_s", "load_s", "resident_bytes")

    def __post_init__(self):
        for name in ("calls", "times", "form_keys", "form_rounds", "rows", "prompts", "longest"):
            check_count(f"study.{name}", getattr(self, name))
        for name in ("bank_shapes", "form_shapes"):
            for shape in getattr(self, name):
                check_choice(f"study.{name}", shape, tuple(SHAPES))
        check_count("study.form_keys", self.form_keys, least=self.rows)
        check_count("study.bank_keys", min(self.bank_keys, default=0), least=self.rows)

    def check(self, lab: Lab) -> None:
        check_memory("this study measures it; run it on Linux")

    def measure(self, lab: Lab) -> list[GraphRow]:
        units = lab.units("cells")
        for device in survey():
            say(f"{device.name}: {device.full_name}, driver {device.driver}; {device.problem or 'a small INT8 graph ran on it'}")
        row = replace(lab.timing_row(GraphRow), estimate_device="CPU", context_tokens=self.longest)
        say(f"banks: this run's, and those of {', '.join(self.bank_shapes)}; every phase in a process of its own")
        form, grid = lab.banks.form, lab.offline.grid
        shapes, plan = lab.banks.shapes(form, pairs=len(grid.pairs))
        rows = [replace(row, method=OWN, metric="padding", value=plan.waste, n=1, shapes=len(shapes))]
        recipes = {OWN: Recipe(replace(grid, key_offset=None), tuple(shapes), form)}  # no graph holds an offset
        recipes |= {name: Recipe.of(name, rows=self.rows, keys=self.bank_keys) for name in self.bank_shapes}
        repeated = {"calls": self.calls, "times": self.times}
        for name, recipe in bar(list(recipes.items()), "banks"):
            measured = units.get(f"bank-{name}", partial(measure_bank, recipe, **repeated))
            bank_row, n = row if name == OWN else replace(row, model=name), counts(**repeated)
            rows += [
                replace(bank_row, method=name, metric=metric, value=float(measured[metric]), unit=unit, n=n[metric])
                for metric, unit in UNITS.items()
            ]
        for shape in bar(self.form_shapes, "forms"):
            seconds = units.get(f"forms-{shape}", partial(self._form_seconds, shape))
            rows += _form_rows(replace(row, model=shape), {name: Timing(tuple(values)) for name, values in seconds.items()})
        return rows + self._plan_rows(lab, row)

    def _form_seconds(self, shape: str) -> dict[str, list[float]]:
        timings = measure_forms(shape, rows=self.rows, keys=self.form_keys, rounds=self.form_rounds)
        return {name: list(timing.seconds) for name, timing in timings.items()}

    def _plan_rows(self, lab: Lab, row: GraphRow) -> list[GraphRow]:
        """Padding by policy and number of shapes, for prompts of every length alike."""
        draw_length = random.Random(lab.seed)
        prompts = [draw_length.randint(1, self.longest) for _ in range(self.prompts)]
        lengths = chunk_lengths(prompts, lab.of("graphs").chunk_tokens)
        data = f"{self.prompts} prompts of 1 to {self.longest} tokens"
        rows = []
        for limit in self.limits:
            for policy in POLICIES:
                plan = plan_capacities(lengths, context_tokens=self.longest, limit=limit, policy=policy)
                plan_row = replace(row, method=policy, model="none", data=data, path_kind="quality")
                rows.append(replace(plan_row, metric="waste", value=plan.waste, n=lengths.total(), shapes=limit))
        return rows

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"graphs": draw_graphs(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """A line for each bank; the targets are for 54 graphs on two cores."""
        columns = {
            "graphs": ("graphs", 1.0, "{:.0f}"),
            "build_and_compile_s": ("build + compile s (< 3)", 1.0, "{:.2f}"),
            "load_s": ("load s (< 0.5)", 1.0, "{:.2f}"),
            "openvino_cache_s": ("by OpenVINO's cache s", 1.0, "{:.2f}"),
            "resident_bytes": ("resident MB (< 300)", 1e-6, "{:.0f}"),
            "disk_bytes": ("on disk MB", 1e-6, "{:.2f}"),
            "infer_us": ("call µs, bound (< 30)", 1.0, "{:.1f}"),
            "call_us": ("with copies µs", 1.0, "{:.1f}"),
        }
        table = Table("bank", *(name for name, _, _ in columns.values()), title=title)
        for name in dict.fromkeys(rows.method[rows.metric == "graphs"]):
            values = rows[rows.method == name].set_index("metric").value
            table.add_row(name, *(form.format(values[metric] * factor) for metric, (_, factor, form) in columns.items()))
        return table


def _form_rows(row: GraphRow, timings: dict[str, Timing]) -> list[GraphRow]:
    rows = []
    for name, timing in timings.items():
        low, high = timing.quartiles_s
        form_row = replace(row, method=name, n=len(timing.seconds), unit="ms")
        rows += [
            replace(form_row, metric="launch_ms", value=timing.median_s * 1e3),
            replace(form_row, metric="lower_ms", value=low * 1e3),
            replace(form_row, metric="upper_ms", value=high * 1e3),
            replace(form_row, metric="times_faster", value=ratio(timings[BASELINE], timing), unit="1"),
        ]
    return rows
