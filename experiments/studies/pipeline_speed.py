"""The pipeline's modes against all heads at once, side by side: one chunk at the end of many keys, on random tensors.

Heads of different scales, so that they fall into several buckets of the bank, and of different retentions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.table import Table

from experiments.lab import Lab
from experiments.part_building import build, part_name
from experiments.progress import bar, say
from experiments.random_layers import SHAPES, Case, Tensors
from experiments.refusals import check_choice, check_count
from experiments.studies.base import Study
from shadowattn.energy import energy_source, joules
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank, GraphShape
from shadowattn.graphs.planner import launch_sizes
from shadowattn.graphs.symmetric_int8 import absmax_scales
from shadowattn.interleave import interleave
from shadowattn.kernels import choose, native
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.executor import Threads
from shadowattn.online.latency import LatencyProfile
from shadowattn.online.latency_profiler import LatencyProfiler
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.reporting.figures.pipeline_speed import draw as draw_pipeline_speed
from shadowattn.reporting.rows import SpreadRow
from shadowattn.types import RetentionProfile, ScaleGrid

ESTIMATORS = ("int8_graph", "int8_fused")


@dataclass(frozen=True)
class PipelineRow(SpreadRow):
    """A row about one of the pipeline's modes; `scheduler` is who ordered its heads, empty: nobody.

    `energy_source`: what measures energy on the machine, `rapl` or `none`.
    """

    scheduler: str = ""
    energy_source: str = ""


@dataclass(frozen=True)
class PipelineSpeed(Study):
    """Layers of `shapes`, the last `rows` rows of each number of `keys`, `retention` on average.

    Medians of `rounds` calls that take turns; `repeats` calls a point of the latency profile that `planned` plans by. Where the
    machine counts energy, that of a call too, the mean over `energy_seconds` of calls on end.
    """

    shapes: list[str] = field(default_factory=lambda: ["qwen2-0.5b", "qwen2-1.5b"])
    keys: list[int] = field(default_factory=lambda: [1024, 4096, 8192])
    rows: int = 256
    retention: float = 0.2
    rounds: int = 25
    repeats: int = 5
    energy_seconds: float = 2.0
    needs: ClassVar[tuple[str, ...]] = ("scheduler", "threads")
    headline: ClassVar[tuple[str, ...]] = ("times_faster_than_batched", "time")

    def __post_init__(self):
        for shape in self.shapes:
            check_choice("study.shapes", shape, tuple(SHAPES))
        for name in ("rows", "rounds", "repeats"):
            check_count(f"study.{name}", getattr(self, name))
        if not self.shapes or not self.keys or min(self.keys) < self.rows:
            raise InputError(f"study.shapes, study.keys: expected some of each, and no fewer keys than {self.rows} rows")
        if not 1 <= self.energy_seconds <= 60:
            raise InputError(f"study.energy_seconds: expected 1 to 60, got {self.energy_seconds}")
        if not 0 < self.retention <= 2 / 3:
            raise InputError(
                f"study.retention: expected one in (0, 2/3], heads keep up to 1.5 times as much, got {self.retention}"
            )

    def check(self, lab: Lab) -> None:
        native.require()

    def measure(self, lab: Lab) -> list[PipelineRow]:
        cases = [(shape, keys, name) for shape in self.shapes for keys in self.keys for name in ESTIMATORS]
        say(f"pipeline: {len(cases)} chunks in up to six modes, {self.rounds} rounds each")
        scheduler, units = build(lab.of("scheduler")), lab.units("cells")
        row = replace(lab.timing_row(PipelineRow), kernel=f"native ({native.level()})", n=self.rounds, unit="ms")
        row = replace(row, retention=self.retention, chunk_rows=self.rows, energy_source=energy_source())
        rows = []
        for shape, keys, name in bar(cases, "time"):
            seconds = units.get(f"{shape} {keys} {name}", partial(self._seconds, shape, keys, name, scheduler))
            spent = units.get(f"{shape} {keys} {name} energy", partial(self._joules, shape, keys, name, scheduler))
            at = replace(
                row, model=shape, context_tokens=keys, estimator=name, estimate_device="CPU" if name == "int8_graph" else "none"
            )
            for mode, times in seconds.items():
                low, median, high = (1e3 * float(x) for x in np.percentile(times, (25, 50, 75)))
                faster = float(np.median(np.divide(seconds["batched"], times)))
                planner = part_name(lab.of("scheduler")) if mode == "planned" else ""
                one = replace(at, method=f"{name} {mode}", scheduler=planner)
                rows.append(replace(one, metric="time", value=median, low=low, high=high))
                rows.append(replace(one, metric="times_faster_than_batched", value=faster, unit="1", low=faster, high=faster))
                if mode in spent:
                    rows.append(replace(one, metric="energy", value=spent[mode], unit="J", low=spent[mode], high=spent[mode]))
        return rows

    def _seconds(self, shape: str, keys: int, estimator: str, scheduler) -> dict[str, list[float]]:
        case = Case(shape, torch.float32, keys, self.rows, self.retention)
        timings = interleave(self._calls(*make_chunk(case, estimator), scheduler), rounds=self.rounds, warmup=3)
        return {mode: list(timing.seconds) for mode, timing in timings.items()}

    def _joules(self, shape: str, keys: int, estimator: str, scheduler) -> dict[str, float]:
        """Energy of a call by mode; of none where the machine counts no energy."""
        if energy_source() == "none":
            return {}
        case = Case(shape, torch.float32, keys, self.rows, self.retention)
        calls = self._calls(*make_chunk(case, estimator), scheduler)
        return {mode: joules(call, seconds=self.energy_seconds) for mode, call in calls.items()}

    def _calls(self, chunk: Chunk, parts: Parts, scheduler) -> dict[str, Callable[[], None]]:
        """A call for each mode that makes sense for the estimator."""
        modes = {mode: Pipeline(mode) for mode in ("batched", "serial", "overlap")}
        if not parts.estimator.selects:
            threads, profile = Threads(1, 1, 1), self._profile(chunk, parts, Threads(1, 1, 1))
            modes |= {
                "overlap, all cores each": Pipeline("overlap", threads=Threads(*(torch.get_num_threads(),) * 3)),
                "grouped": Pipeline("grouped"),
                "planned": Pipeline("planned", threads=threads, scheduler=scheduler, profile=profile),
            }
        return {name: partial(_call, pipeline, chunk, parts) for name, pipeline in modes.items()}

    def _profile(self, chunk: Chunk, parts: Parts, threads: Threads) -> LatencyProfile:
        """At the chunk's own keys alone."""
        (heads, rows, dim), (groups, keys, _) = chunk.q.shape, chunk.k.shape
        profiler = LatencyProfiler(heads, groups, dim, rows, chunk.q.dtype, parts.estimator, parts.rule, parts.kernels, threads)
        retentions = (chunk.retention.min().item(), chunk.retention.mean().item(), chunk.retention.max().item())
        return LatencyProfile(profiler.binding(), tuple(profiler.measure(keys, retentions, repeats=self.repeats)))

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"pipeline_speed": draw_pipeline_speed(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """Times with quartiles, and ratios to all heads at once by the same estimator."""
        table = Table("case", "pipeline", "ms", "quartiles", "times faster than batched", title=f"{title} · measured")
        for (shape, keys, name), cell in rows.groupby(["model", "context_tokens", "estimator"], sort=False):
            case = f"{shape}, {keys} keys, {name}"
            for method, values in cell.groupby("method", sort=False):
                time, faster = (values[values.metric == one].iloc[0] for one in ("time", "times_faster_than_batched"))
                mode = str(method).removeprefix(f"{name} ")
                table.add_row(case, mode, f"{time.value:.2f}", f"{time.low:.2f} … {time.high:.2f}", f"{faster.value:.2f}")
                case = ""
            table.add_section()
        return table


def make_chunk(case: Case, estimator: str) -> tuple[Chunk, Parts]:
    """Heads half to twice as large as the mean, one or the other key head larger: at least four of nine buckets are in use."""
    t = Tensors(case)
    heads, groups, dim = SHAPES[case.shape]
    order = torch.randperm(heads, generator=torch.Generator().manual_seed(1))
    q = t.q * (2.0 ** torch.linspace(-1, 1, heads)[order])[:, None, None]
    k = t.k * (2.0 ** torch.linspace(-0.5, 0.5, groups))[:, None, None]
    if estimator == "int8_fused":
        built = Int8Fused.of(q, k)
    else:
        scales = (tuple(float(absmax_scales(x).mean()) * step for step in (0.5, 1, 2)) for x in (q, k))
        profile = RetentionProfile(((case.retention,) * heads,), ScaleGrid(*scales), dim, "", case.shape, "")
        sizes = launch_sizes((1, 2, 4), heads=heads, kv_heads=groups)
        built = Int8Graph(GraphBank.build(profile, tuple(GraphShape(n, case.rows, dim, case.keys, group=n) for n in sizes)))
    retention = torch.linspace(0.5, 1.5, heads, dtype=torch.float64)[order.flip(0)] * case.retention
    kernels = choose("native", head_dim=dim, dtype=q.dtype)
    return Chunk.of(q, k, t.v, retention=retention, scale=t.scale), Parts(built, Rule(), kernels)


def _call(pipeline: Pipeline, chunk: Chunk, parts: Parts) -> None:
    pipeline.run(Stages(chunk.rewound(), parts), keep_lists=False)
