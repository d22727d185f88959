"""The simulator against the product's own pipeline: whole calls on chunks that nothing was measured or fitted on."""

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table
from scipy import stats

from experiments.lab import Lab
from experiments.part_building import part_name
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.latency import LatencyStudy, make_profiler
from shadowattn.errors import InputError
from shadowattn.interleave import interleave
from shadowattn.machine import cores, processor
from shadowattn.online.chunk import Chunk
from shadowattn.online.latency import Latency, LatencyProfile, without_slowest
from shadowattn.online.latency_profiler import LatencyProfiler
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.plan import Group, Plan, Work
from shadowattn.online.simulation import simulate
from shadowattn.online.simulation.description import save_device
from shadowattn.online.simulation.device import ChunkShape, Device, Layer, Number
from shadowattn.online.simulation.fit import fit_device
from shadowattn.online.stages import Parts, Stages
from shadowattn.reporting import predictions
from shadowattn.reporting.figures.validate_simulator import draw as draw_validate_simulator
from shadowattn.reporting.rows import Row

BY = ("profile", "device")
# `batched` has no pipeline to simulate; it is measured for the ratio.
MODES = ("batched", "serial", "overlap", "grouped", "planned")
SIMULATED = MODES[1:]
FITTED = "fitted on this case"


@dataclass(frozen=True)
class CaseRow(Row):
    """A row about one chunk: `case` numbers it, `mode` is the pipeline's, `by` what the simulation went by.

    `turn_error` rows are about all held-out chunks in one of the passes, which `turn` numbers; −1: of all passes.
    """

    case: int = 0
    turn: int = -1
    mode: str = ""
    by: str = ""


@dataclass(frozen=True)
class Case:
    """A chunk at the end of `keys` keys: the scale pair and the retention of each head [H]."""

    keys: int
    pairs: tuple[int, ...]
    retention: tuple[float, ...]
    held_out: bool


@dataclass(frozen=True)
class Costs:
    """What stages take under the thread budgets of one pipeline: measured, and as a device was fitted to it."""

    profile: LatencyProfile
    device: Device
    fit_errors: dict[str, float]


@dataclass(frozen=True)
class ValidateSimulator(LatencyStudy):
    """Calls on `held_out_chunks` chunks, and on `fit_chunks` more that contention is fitted on.

    `passes` times in turn: a latency profile with `repeats` calls of each point, and `rounds` calls of every chunk in every mode.
    Each pass is predicted from its own profile, since a virtual machine's speed changes from one minute to the next; errors are
    means over passes, and their interval is over passes. Contention is searched on a grid of `contention_steps`: cores that
    stages at once are worth, from 1 to all, times wakeup latencies from 0 to `largest_wakeup_us`. Seeds of
    the chunks' tensors count from `first_seed`, those of a profile's from 0.
    """

    retentions: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.2, 0.4, 0.7, 1.0])
    repeats: int = 6
    passes: int = 8
    rounds: int = 10
    fit_chunks: int = 6
    held_out_chunks: int = 12
    largest_wakeup_us: float = 1500.0
    contention_steps: list[int] = field(default_factory=lambda: [11, 16])
    first_seed: int = 500

    headline: ClassVar[tuple[str, ...]] = ("error", "makespan")

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("passes", 2), ("rounds", 1), ("fit_chunks", 1), ("held_out_chunks", 1)):
            check_count(f"study.{name}", getattr(self, name), least=least)
        if len(self.contention_steps) != 2 or min(self.contention_steps) < 1:
            raise InputError(f"study.contention_steps: expected two numbers from 1 up, got {self.contention_steps}")
        if not 0 <= self.largest_wakeup_us < math.inf:
            raise InputError(f"study.largest_wakeup_us: expected a time, got {self.largest_wakeup_us:g}")

    def check(self, lab: Lab) -> None:
        super().check(lab)
        if lab.main.on_device or "bank" not in lab.main.needs:
            setting = f"{part_name(lab.main.estimator)} with selection.place={lab.main.selection.place}"
            raise InputError(f"ValidateSimulator: expected estimator=int8_graph with selection.place=host, got {setting}")

    def measure(self, lab: Lab) -> list[CaseRow]:
        """Measured and simulated times of whole calls in every mode; once measured in `folder` they are not again.

        `serial` and `batched` run on all cores and read scores where the launch left them, as the product does; `serial` is
        simulated from a profile of its own, taken the same way. How many cores the processor is worth to stages that run at once,
        and the wakeup latency, are fitted on some chunks; the errors that count are those of the others. The device fitted to the
        profile of overlapped stages goes into the run's folder as a description.
        """
        base, units = lab.pipeline, lab.units("cells")
        lab.banks.bank.compile()  # for all cores; it was compiled for a stage's share
        profilers = {"serial": make_profiler(lab, replace(base, mode="serial")), "overlap": make_profiler(lab, base)}
        lengths = profilers["overlap"].key_lengths(max(lab.prompt_tokens))
        retentions = sorted(self.retentions)
        cases = self.draw_cases(profilers["overlap"], lengths, seed=lab.seed)
        modes = f"{len(cases)} chunks in {len(MODES)} modes"
        say(f"{self.passes} times in turn: latency profiles at {len(lengths)} lengths, and {modes}")
        profiles, times = {name: [] for name in profilers}, []
        for number in bar(range(self.passes), "measure"):
            for name, profiler in profilers.items():
                points = units.get(f"{name} profile {number}", partial(self._points, profiler, lengths, name))
                profiles[name].append(LatencyProfile(profiler.binding(), tuple(Latency(**point) for point in points)))
            planned_by = profiles["overlap"][0]
            times.append(units.get(f"calls {number}", partial(self._call_times, profilers["overlap"], base, planned_by, cases)))
        layer = Layer(lab.shape.heads, lab.shape.kv_heads, lab.shape.head_dim)
        costs = {name: _costs(_together(pass_profiles), layer) for name, pass_profiles in profiles.items()}
        costs_of_pass = [
            {name: _costs(pass_profiles[number], layer) for name, pass_profiles in profiles.items()}
            for number in range(self.passes)
        ]
        measured = {key: [_mean(one[key]) for one in times] for key in times[0]}
        predictions: dict[tuple[int, str, str], list[Callable[[float, float], float]]] = {}  # of every pass
        for number, case in enumerate(cases):
            stages = Stages(profilers["overlap"].chunk(*_of(case), seed=0), profilers["overlap"].parts)
            pass_predictions = [_predictions(lab, stages, base, planned_by, pass_costs, layer) for pass_costs in costs_of_pass]
            predictions |= {(number, *key): [prediction[key] for prediction in pass_predictions] for key in pass_predictions[0]}
        fit = [number for number, case in enumerate(cases) if not case.held_out]
        worth_cores, wakeup_latency_us = self._fit_contention(predictions, measured, fit)
        say(f"{cores()} cores are worth {worth_cores:.1f} to stages at once; wakeup latency {wakeup_latency_us:.0f} µs")
        between = costs["overlap"].profile
        task_overhead_us = float(np.mean([point.mean_us for point in between.points if point.stage == "task_overhead"]))
        device = self._with_contention(costs["overlap"].device, worth_cores, wakeup_latency_us, task_overhead_us)
        path = save_device(device, lab.folder / "device.yaml")
        say(f"this machine's description: study.device={path}")
        common = replace(
            lab.timing_row(CaseRow), unit="us", n=self.passes * self.rounds, estimator=part_name(lab.main.estimator),
            estimate_device=lab.device.label,
        )  # fmt: skip
        contention = {
            "task_overhead": (task_overhead_us, "us"),
            "effective_cores": (worth_cores, "1"),
            "wakeup_latency": (wakeup_latency_us, "us"),
        }
        rows = [
            replace(common, by="device", metric="fit_error", method=stage, mode=mode, value=error, unit="1", measured="simulated")
            for mode, mode_costs in costs.items()
            for stage, error in mode_costs.fit_errors.items()
        ]
        rows += [
            replace(
                common, metric=metric, value=value, unit=unit, measured="measured" if metric == "task_overhead" else "simulated"
            )
            for metric, (value, unit) in contention.items()
        ]
        rows += _switches(common, profilers["overlap"], retentions, cases)
        of_passes: dict[tuple[str, str], list[np.ndarray]] = {}
        for number, case in enumerate(cases):
            row = replace(common, case=number, context_tokens=case.keys, retention=float(np.mean(case.retention)))
            row = replace(row, flag="" if case.held_out else FITTED)
            batched = float(np.mean(measured[_key(number, "batched")]))
            for mode in MODES:
                passes = measured[_key(number, mode)]
                took = float(np.mean(passes))
                rows.append(replace(row, mode=mode, metric="makespan", value=took))
                rows.append(replace(row, mode=mode, metric="uncertainty", value=_half_width(passes) / took, unit="1"))
                rows.append(replace(row, mode=mode, metric="ratio_to_batched", value=took / batched, unit="1"))
                for by in BY if mode in SIMULATED else ():
                    simulated = replace(row, mode=mode, by=by, measured="simulated", n=self.passes)
                    values = [predict(worth_cores, wakeup_latency_us) for predict in predictions[number, mode, by]]
                    errors = np.divide(values, passes) - 1
                    rows.append(replace(simulated, metric="makespan", value=float(np.mean(values))))
                    rows.append(replace(simulated, metric="error", value=float(errors.mean()), unit="1"))
                    if case.held_out:
                        of_passes.setdefault((mode, by), []).append(errors)
        for (mode, by), errors in of_passes.items():
            row = replace(common, mode=mode, by=by, metric="turn_error", measured="simulated", n=len(errors), unit="1")
            rows += [replace(row, turn=turn, value=float(value)) for turn, value in enumerate(np.mean(errors, 0))]
        return rows

    def draw_cases(self, profiler: LatencyProfiler, lengths: list[int], *, seed: int) -> list[Case]:
        """Chunks of lengths that the profile has no point at, heads in mixed buckets, retentions alike and different.

        Some, spread evenly, are to fit contention on; the others are held out. Raises `InputError` where there are too few.
        """
        count = self.fit_chunks + self.held_out_chunks
        step = max(1, profiler.rows // 4)  # a chunk may end anywhere: a prompt may go on where an earlier one ended
        between = [n for n in range(lengths[len(lengths) // 4], lengths[-1], step) if n not in lengths]
        if len(between) < count:
            raise InputError(
                f"validate_simulator: expected {count} lengths that the profile has no point at, got {len(between)}; "
                "use a larger evaluation.context_tokens or a smaller graphs.chunk_tokens"
            )
        draw, low, high = random.Random(seed), min(self.retentions), max(self.retentions)
        fitted = {round((index + 0.5) * count / self.fit_chunks - 0.5) for index in range(self.fit_chunks)}  # spread evenly
        cases = []
        for number, at in enumerate(np.linspace(0, len(between) - 1, count)):
            alike = number // 3 % 2 == 0
            retention = [0.2 if alike else draw.uniform(low, high) for _ in range(profiler.heads)]
            cases.append(Case(between[round(at)], tuple(profiler.mixed(draw)), tuple(retention), number not in fitted))
        return cases

    def _points(self, profiler: LatencyProfiler, lengths: list[int], name: str) -> list[dict]:
        """Points of one pass; `serial` launches one head at a time."""
        how = {"repeats": self.repeats, "sizes": [1] if name == "serial" else None}
        return [asdict(point) for keys in lengths for point in profiler.measure(keys, sorted(self.retentions), **how)]

    def _call_times(
        self, profiler: LatencyProfiler, base: Pipeline, latency: LatencyProfile, cases: list[Case]
    ) -> dict[str, list[float]]:
        """Microseconds of whole calls by case and mode; `latency` is what `planned` plans by. All take turns."""
        calls = {}
        for number, case in enumerate(cases):
            chunk = profiler.chunk(*_of(case), seed=self.first_seed + number)
            for mode in MODES:
                pipeline = replace(base, mode=mode, profile=latency)
                calls[_key(number, mode)] = partial(_call, pipeline, chunk, profiler.parts)
        timings = interleave(calls, rounds=self.rounds, warmup=2)
        return {key: [1e6 * seconds for seconds in timing.seconds] for key, timing in timings.items()}

    def _fit_contention(self, predictions: dict, measured: dict[str, list[float]], numbers: list[int]) -> tuple[float, float]:
        """(cores, wakeup_latency_us) with the least squared error of overlapped calls.

        Both say what stages that run at once do to one another. Fitted by the profile's costs, and then the same for both
        sources: it is the machine's, not theirs.
        """

        def error(pair: tuple[float, float]) -> float:
            return sum(
                (predict(*pair) / took - 1) ** 2
                for number in numbers
                for mode in SIMULATED
                if mode != "serial"
                for predict, took in zip(predictions[number, mode, "profile"], measured[_key(number, mode)], strict=True)
            )

        of_cores, of_latencies = self.contention_steps
        grid = np.linspace(1, cores(), of_cores), np.linspace(0, self.largest_wakeup_us, of_latencies)
        return min(((float(c), float(w)) for c in grid[0] for w in grid[1]), key=error)

    def _with_contention(self, device: Device, worth_cores: float, wakeup_latency_us: float, task_overhead_us: float) -> Device:
        """The device with what its stages do to one another, and what the pipeline itself costs there."""
        source = f"least squared error of overlapped calls, {self.fit_chunks} chunks of experiments.run +exp=validate_simulator"
        between = Number(task_overhead_us, "measured", "calls of the latency profile: what they take between their spans")
        return replace(
            device,
            cores=Number(worth_cores, "fitted", source),
            wakeup_latency_us=Number(wakeup_latency_us, "fitted", source),
            task_overhead_us=between,
        )

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"validate_simulator": draw_validate_simulator(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """By mode: the error of both simulations over the held-out chunks, and whether the target is held."""
        table = Table("mode", "costs from", "mean error (95 %)", "worst", "within 10 %", "target", "measured ms", title=title)
        for one in predictions.prediction_errors(rows):
            measured = rows[(rows.flag == "") & (rows["mode"] == one.mode) & (rows.measured == "measured")]
            times = measured[measured.metric == "makespan"].value / 1e3
            table.add_row(*one.cells(), f"{times.min():.1f} … {times.max():.1f}")
        ratios = rows[(rows.metric == "ratio_to_batched") & (rows.flag == "")].groupby("mode", sort=False).value
        table.caption = "measured, times batched: " + ", ".join(f"{mode} {series.median():.2f}" for mode, series in ratios)
        return table


def _of(case: Case) -> tuple:
    return case.pairs, case.retention, case.keys


def _key(number: int, mode: str) -> str:
    return f"{number} {mode}"


def _call(pipeline: Pipeline, chunk: Chunk, parts: Parts) -> None:
    """One layer's call as a prefill makes it, as if for the first time."""
    pipeline.run(Stages(chunk.rewound(), parts), keep_lists=False)


def _mean(times: list[float]) -> float:
    return float(np.mean(without_slowest(times, float)))


def _half_width(passes: list[float]) -> float:
    """Half the 95 % interval of the mean over passes, by Student's t: calls of one pass are not independent."""
    return float(stats.t.ppf(0.975, len(passes) - 1) * np.std(passes, ddof=1) / len(passes) ** 0.5)


def _together(profiles: list[LatencyProfile]) -> LatencyProfile:
    """Means over several profiles of the same points."""
    points = [
        replace(
            one[0],
            mean_us=float(np.mean([p.mean_us for p in one])),
            median_us=float(np.mean([p.median_us for p in one])),
            p95_us=float(np.mean([p.p95_us for p in one])),
            n=sum(p.n for p in one),
        )
        for one in zip(*(sorted(profile.points, key=_place) for profile in profiles), strict=True)
    ]
    return LatencyProfile(profiles[0].binding, tuple(points))


def _place(point: Latency) -> tuple:
    return point.stage, point.heads, point.bucket, point.capacity, point.retention, point.keys


def _costs(profile: LatencyProfile, layer: Layer) -> Costs:
    fitted = fit_device(profile, layer, name=processor(), cores=cores())
    return Costs(profile, fitted.device, fitted.errors)


def _predictions(
    lab: Lab, stages: Stages, base: Pipeline, planned_by: LatencyProfile, costs: dict[str, Costs], layer: Layer
) -> dict[tuple[str, str], Callable[[float, float], float]]:
    """By mode and source of costs: the simulated time of a whole call for a number of cores and a time to wake.

    What a call takes before and between its spans is the profile's in both.
    """
    chunk = stages.chunk
    groups, retention, keys = stages.launches(), chunk.retention.tolist(), chunk.keys
    simulations = {}
    for mode in SIMULATED:
        launches = _single(groups) if mode in ("serial", "overlap") else groups
        mode_costs = costs["serial" if mode == "serial" else "overlap"]
        works = {
            "profile": mode_costs.profile.work(launches, retention, keys=keys),
            "device": mode_costs.device.work(
                layer, ChunkShape(chunk.q.shape[1], keys), launches, retention, capacity=_capacity(stages)
            ),
        }
        plan = Plan(tuple(range(len(launches))), tuple(head for group in launches for head in group.heads))
        if mode == "planned":
            plan = base.plan(stages, planned_by.work(launches, retention, keys=keys))
        how = {"mode": "serial" if mode == "serial" else "overlap", "queue_heads": base.queue_heads, "device": lab.device.name}
        how["task_overhead_us"] = mode_costs.profile.call_us("task_overhead", keys)
        for by, work in works.items():
            simulations[mode, by] = partial(_simulated, work, plan, mode_costs.profile.call_us("prepare", keys), how)
    return simulations


def _simulated(work: Work, plan: Plan, prepare_us: float, how: dict, worth_cores: float, wakeup_latency_us: float) -> float:
    return prepare_us + simulate(work, plan, cores=worth_cores, wakeup_latency_us=wakeup_latency_us, **how).makespan_us


def _single(groups: list[Group]) -> list[Group]:
    """A launch for each head, in their order."""
    return sorted((Group((head,), group.bucket) for group in groups for head in group.heads), key=lambda g: g.heads)


def _capacity(stages: Stages) -> int:
    """Keys of the graph that serves the chunk: what a launch computes."""
    bank, (_, rows, head_dim) = stages.estimator.graphs, stages.chunk.q.shape
    return bank.shape_for(heads=bank.launch_heads[0], rows=rows, keys=stages.chunk.keys, head_dim=head_dim).keys


def _switches(common: CaseRow, profiler: LatencyProfiler, retentions: list[float], cases: list[Case]) -> list[CaseRow]:
    """How often a launch of one head follows one of another bucket: in the profile's chunks, and in those it is held to."""
    chains = {"profile": [[g.bucket for g in one.launches] for one in profiler.layouts(retentions, [1])]}
    chains["chunks"] = [[profiler.bank.slot(pair) for pair in case.pairs] for case in cases if case.held_out]
    rows = []
    for by, bucket_chains in chains.items():
        pairs = [pair for chain in bucket_chains for pair in zip(chain, chain[1:], strict=False)]
        share = sum(a != b for a, b in pairs) / len(pairs)
        rows.append(replace(common, metric="bucket_switches", by=by, mode="serial", value=share, unit="1", n=len(pairs)))
    return rows
