"""The simulator against the executor: the same chunks through both, by the measured profile and by the device fitted to it."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from rich.table import Table
from torch import Tensor

from benchmarks.interleave import interleave
from experiments import study
from experiments.progress import bar, say
from experiments.setup import Setup, make_pipeline, needs_bank
from experiments.stages import Offline, latency_probe
from shadowattn.artifacts import Units
from shadowattn.graphs import GraphBank
from shadowattn.kernels import choose
from shadowattn.machine import cores, processor
from shadowattn.online.chunk import Chunk
from shadowattn.online.executor import Ran, ScorePool, run_sequential
from shadowattn.online.latency import Latency, LatencyProfile
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.plan import Group, Launch, Plan, Work
from shadowattn.online.probe import Probe
from shadowattn.online.selection import Rule
from shadowattn.online.simulation import simulate
from shadowattn.online.simulation.description import save_device
from shadowattn.online.simulation.device import ChunkShape, Device, Layer, Number
from shadowattn.online.simulation.fit import fit_device
from shadowattn.online.timeline import Timeline
from shadowattn.reporting import simulation_figures
from shadowattn.reporting.rows import Row
from shadowattn.types import Heads

BY = ("spans", "profile", "device")
MODES = ("off", "overlap", "fused", "planned")
# What the issue of the simulator asks for.
BAR = 0.10
# Fewer rounds leave the medians of overlapped runs uncertain by as much as the bar. The profile is measured in turn with them,
# so that a busy minute of the machine is neither's own.
_PASSES, _ROUNDS = 5, 16


@dataclass(frozen=True)
class CaseRow(Row):
    """A row about one case: `case` numbers it, `mode` is the pipeline's, `by` what the simulation went by."""

    case: int = 0
    mode: str = ""
    by: str = ""


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[CaseRow]:
    """Measured and simulated makespans of a dozen cases in every mode; once measured in `folder` they are not again.

    The device fitted to the profile goes into the run's folder as a description.

    How many cores the processor is worth to stages that run at once, and how long one takes to wake, are fitted on every second
    case, as is what the pipeline itself takes; the errors that count are those of the others.
    """
    base, units = make_pipeline(setup.config), Units(folder / "cells")
    probe = latency_probe(setup, bank, base)
    lengths, retentions = probe.key_lengths(max(setup.prompt_tokens)), sorted(setup.config.latency.retentions)
    cases = _cases(setup, lengths, retentions)
    say(f"{_PASSES} times in turn: the latency profile at {len(lengths)} lengths, and {len(cases)} cases in {len(MODES)} ways")
    profiles, found = [], []
    for number in bar(range(_PASSES), "measure"):
        points = units.get(f"profile {number}", lambda: _points(probe, lengths, retentions))
        profiles.append(LatencyProfile(probe.binding(), tuple(Latency(**point) for point in points)))
        found.append(units.get(f"cases {number}", lambda: _measured(setup, bank, base, profiles[0], cases)))
    latency, found = _together(profiles), [_merged(of) for of in zip(*found, strict=True)]
    layer = Layer(setup.shape.heads, setup.shape.kv_heads, setup.shape.head_dim)
    fitted = fit_device(latency, layer, name=processor(), cores=cores())
    between_us = float(np.median([_between_us(one) for one in found[::2]]))
    courses = [
        _courses(setup, bank, base, profiles[0], latency, fitted.device, layer, between_us, one["spans"], *case)
        for case, one in zip(bar(cases, "simulate"), found, strict=True)
    ]
    measured = [{mode: float(np.median(took)) for mode, took in one["makespans"].items()} for one in found]
    worth_cores, wake_us = _fit_contention(courses[::2], measured[::2])
    fits = ", ".join(f"{stage} {error:.1%}" for stage, error in fitted.errors.items())
    say(f"fitted: median errors over the profile's points {fits}")
    say(f"{cores()} cores are worth {worth_cores:.1f} to stages at once, and one takes {wake_us:.0f} µs to wake")
    say(f"the pipeline itself: {between_us:.0f} µs for every launch and head of a stage")
    path = save_device(_with_contention(fitted.device, worth_cores, wake_us, between_us), folder / "device.yaml")
    say(f"this machine's description: simulation.device={path}")
    common = CaseRow(**asdict(replace(
        study.common_row(setup, torch.zeros(0, 1)), path_kind="timing", unit="us", n=_PASSES * _ROUNDS, data="random tensors",
        corpus_sha256="", estimator="int8", estimate_device=setup.device.label,
    )))  # fmt: skip
    rows = [
        replace(common, by="device", metric="fit_error", method=stage, value=error, unit="1", measured="simulated")
        for stage, error in fitted.errors.items()
    ]
    contention = {"between": (between_us, "us"), "effective_cores": (worth_cores, "1"), "wake": (wake_us, "us")}
    rows += [
        replace(common, metric=metric, value=value, unit=unit, measured="measured" if metric == "between" else "simulated")
        for metric, (value, unit) in contention.items()
    ]
    for number, case in enumerate(cases):
        row = replace(common, case=number, context_tokens=case[0], retention=sum(case[1]) / len(case[1]))
        row = replace(row, flag="" if number % 2 else "fitted on this case")
        for mode in MODES:
            took = measured[number][mode]
            rows.append(replace(row, mode=mode, metric="makespan", value=took))
            itself = _uncertainty(found[number]["makespans"][mode])
            rows.append(replace(row, mode=mode, metric="uncertainty", value=itself, unit="1"))
            for by in BY:
                simulated = replace(row, mode=mode, by=by, measured="simulated", n=1)
                value = courses[number][mode, by](worth_cores, wake_us)
                rows.append(replace(simulated, metric="makespan", value=value))
                rows.append(replace(simulated, metric="error", value=value / took - 1, unit="1"))
    return rows


def _cases(setup: Setup, lengths: list[int], retentions: list[float]) -> list[tuple[int, list[float]]]:
    """(keys, retention of every head): every fourth of the measured lengths, with retentions alike and different."""
    draw = random.Random(setup.config.seed)
    chosen = [lengths[round(at)] for at in np.linspace(len(lengths) // 4, len(lengths) - 1, 6)]
    heads = setup.shape.heads
    alike = [(keys, [0.2] * heads) for keys in chosen]
    return alike + [(keys, [draw.uniform(retentions[0], retentions[-1]) for _ in range(heads)]) for keys in chosen]


def _points(probe: Probe, lengths: list[int], retentions: list[float]) -> list[dict]:
    return [asdict(point) for keys in lengths for point in probe.measure(keys, retentions, repeats=1)]


def _measured(
    setup: Setup, bank: GraphBank, base: Pipeline, latency: LatencyProfile, cases: list[tuple[int, list[float]]]
) -> list[dict[str, dict]]:
    """For each case makespans by mode, and median spans of sequential runs; `latency` is what `planned` plans by.

    All cases take turns, so that a busy minute of the machine is no case's own. `off` copies its scores as the others do, so that
    all do the same work.
    """
    threads, pool = base.budgets(setup.device.name), ScorePool()
    ran: dict[tuple[int, str], list[Timeline]] = defaultdict(list)
    calls = {}
    for number, (keys, retention) in enumerate(cases):
        chunk = _chunk(setup, bank, keys, torch.tensor(retention, dtype=torch.float64))
        ways = {mode: _pipelined(chunk, Pipeline(mode, base.queue_heads, threads, base.scheduler, latency)) for mode in MODES[1:]}
        for name, launches in (("off", _single(chunk.groups())), ("fused, off", chunk.groups())):
            ways[name] = partial(run_sequential, chunk, launches, threads=threads, keep_lists=False, pool=pool)
        for name, way in ways.items():
            calls[number, name] = lambda key=(number, name), way=way: ran[key].append(way().timeline)
    interleave(calls, rounds=_ROUNDS, warmup=3)

    return [
        {
            "makespans": {mode: [timeline.makespan_us for timeline in ran[number, mode][-_ROUNDS:]] for mode in MODES},
            "spans": {"single": _spans(ran[number, "off"][-_ROUNDS:]), "fused": _spans(ran[number, "fused, off"][-_ROUNDS:])},
        }
        for number in range(len(cases))
    ]


def _together(profiles: list[LatencyProfile]) -> LatencyProfile:
    """Medians over several profiles of the same points."""
    points = [
        replace(
            one[0],
            median_us=float(np.median([p.median_us for p in one])),
            p95_us=float(np.median([p.p95_us for p in one])),
            n=sum(p.n for p in one),
        )
        for one in zip(*(sorted(profile.points, key=_place) for profile in profiles), strict=True)
    ]
    return LatencyProfile(profiles[0].binding, tuple(points))


def _place(point: Latency) -> tuple:
    return point.stage, point.heads, point.bucket, point.capacity, point.retention, point.keys


def _merged(passes: tuple[dict[str, dict], ...]) -> dict[str, dict]:
    """One case over all passes: every makespan, and the median of each span."""
    spans = {
        how: {
            stage: {heads: float(np.median([one["spans"][how][stage][heads] for one in passes])) for heads in of}
            for stage, of in stages.items()
        }
        for how, stages in passes[0]["spans"].items()
    }
    return {"makespans": {mode: [took for one in passes for took in one["makespans"][mode]] for mode in MODES}, "spans": spans}


def _uncertainty(took: list[float]) -> float:
    """Half the width of the median's 95 % interval, relative: it lies between two order statistics, whatever the distribution."""
    ordered, reach = sorted(took), 0.98 * len(took) ** 0.5
    low, high = (ordered[round(min(max(len(took) / 2 + side * reach, 0), len(took) - 1))] for side in (-1, 1))
    return (high - low) / 2 / float(np.median(took))


def _pipelined(chunk: Chunk, pipeline: Pipeline) -> Callable[[], Ran]:
    return lambda: pipeline.run(chunk, keep_lists=False)


def _spans(timelines: list[Timeline]) -> dict[str, dict[str, float]]:
    """Median time of every span, by stage and heads."""
    took = defaultdict(lambda: defaultdict(list))
    for timeline in timelines:
        for span in timeline.spans:
            took[span.stage][" ".join(map(str, span.heads))].append(span.end_us - span.start_us)
    return {stage: {heads: float(np.median(times)) for heads, times in of.items()} for stage, of in took.items()}


def _work_of(spans: dict[str, dict[str, float]], groups: list[Group]) -> Work:
    """The costs that a sequential run of the same chunk had."""
    launches = tuple(Launch(group.heads, spans["estimate"][" ".join(map(str, group.heads))]) for group in groups)
    heads = range(len(spans["select"]))
    return Work(launches, *(tuple(spans[stage][str(head)] for head in heads) for stage in ("select", "attend")))


def _courses(
    setup: Setup, bank: GraphBank, base: Pipeline, planned_by: LatencyProfile, latency: LatencyProfile, device: Device,
    layer: Layer, between_us: float, spans: dict, keys: int, retention: list[float],
) -> dict[tuple[str, str], Callable[[float, float], float]]:  # fmt: skip
    """By mode and source of costs: the simulated makespan for a number of cores and a time to wake."""
    chunk = _chunk(setup, bank, keys, torch.tensor(retention, dtype=torch.float64))
    groups, rows = chunk.groups(), chunk.q.shape[1]
    made = {}
    for mode in MODES:
        launches = _single(groups) if mode in ("off", "overlap") else groups
        served = _capacity(bank, chunk, keys)
        own = spans["single" if mode in ("off", "overlap") else "fused"]
        works = {
            "spans": _work_of(own, launches),
            "profile": latency.work(launches, retention, keys=keys),
            "device": device.work(layer, ChunkShape(rows, keys), launches, retention, capacity=served),
        }
        in_order = Plan(tuple(range(len(launches))), tuple(head for group in launches for head in group.heads))
        plan = base.scheduler.plan(planned_by.work(launches, retention, keys=keys)) if mode == "planned" else in_order
        how = {"mode": "off" if mode == "off" else "overlap", "queue_heads": base.queue_heads, "device": setup.device.name}
        how["between_us"] = between_us
        for by, work in works.items():
            made[mode, by] = lambda worth, wake, work=work, plan=plan, how=how: (
                simulate(work, plan, cores=worth, wake_us=wake, **how).makespan_us
            )
    return made


def _fit_contention(courses: list[dict], measured: list[dict[str, float]]) -> tuple[float, float]:
    """(cores, wake_us) with the least squared error of overlapped runs: what stages that run at once do to one another.

    Fitted by the same chunks' own spans, and then the same for every source of costs: it is the machine's, not theirs.
    """

    def error(cores_worth: float, wake_us: float) -> float:
        return sum(
            (course[mode, "spans"](cores_worth, wake_us) / took[mode] - 1) ** 2
            for course, took in zip(courses, measured, strict=True)
            for mode in MODES
            if mode != "off"
        )

    grid = [(float(c), float(w)) for c in np.linspace(1, cores(), 11) for w in np.linspace(0, 1500, 16)]
    return min(grid, key=lambda pair: error(*pair))


def _between_us(case: dict[str, dict]) -> float:
    """What a sequential run takes besides its spans, for each of them."""
    spans = [us for stage in case["spans"]["single"].values() for us in stage.values()]
    return max(0.0, (float(np.median(case["makespans"]["off"])) - sum(spans)) / len(spans))


def _with_contention(device: Device, worth_cores: float, wake_us: float, between_us: float) -> Device:
    """The device with what its stages do to one another, and what the pipeline itself costs there."""
    source = "least squared error of overlapped runs, every second case of experiments.run +exp=validate_simulator"
    between = Number(between_us, "measured", "sequential runs of the same cases: what they take besides their spans")
    return replace(
        device, cores=Number(worth_cores, "fitted", source), wake_us=Number(wake_us, "fitted", source), between_us=between
    )


def _single(groups: list[Group]) -> list[Group]:
    """A launch for each head, in their order."""
    return sorted((Group((head,), group.bucket) for group in groups for head in group.heads), key=lambda g: g.heads)


def _capacity(bank: GraphBank, chunk: Chunk, keys: int) -> int:
    """Keys of the graph that serves the chunk: what a launch computes."""
    return bank.shape_for(heads=bank.launch_heads[0], rows=chunk.q.shape[1], keys=keys, head_dim=chunk.q.shape[2]).keys


def _chunk(setup: Setup, bank: GraphBank, keys: int, retention: Tensor) -> Chunk:
    """Random tensors, each head's Q of another size, so that heads fall into several buckets."""
    shape, rows = setup.shape, setup.config.graphs.chunk_tokens
    generator = torch.Generator().manual_seed(setup.config.seed + keys)
    sizes = torch.tensor([pair[0] for pair in bank.pairs])[torch.randint(len(bank.pairs), (shape.heads,), generator=generator)]
    q = torch.randn(shape.heads, rows, shape.head_dim, generator=generator) * (30 * sizes)[:, None, None]
    k, v = torch.randn(2, shape.kv_heads, keys, shape.head_dim, generator=generator)
    k = k * (30 * bank.pairs[len(bank.pairs) // 2][1])
    method = setup.methods[setup.config.method]
    estimator = instantiate(method.estimator, **({"bank": bank} if needs_bank(method.estimator) else {}))
    kernels = choose(setup.kernel, head_dim=shape.head_dim, dtype=q.dtype)
    positions = keys - rows + torch.arange(rows)
    parts = Heads.all(shape.heads, shape.kv_heads), estimator, Rule(), kernels, shape.head_dim**-0.5
    return Chunk(q, k, v, retention, 0, positions, *parts)


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """Simulated against measured."""
    simulation_figures.validation(rows, folder / "validate_simulator.png")


def table(rows: pd.DataFrame, title: str) -> Table:
    """By mode: the error of both simulations over the cases that nothing was fitted on."""
    made = Table("mode", "simulated by", "median error", "worst", "within 10 %", "measured ms", "itself ±", title=title)
    held_out = rows[rows.flag == ""]
    for (mode, by), of in held_out[held_out.metric == "error"].groupby(["mode", "by"], sort=False):
        taken = held_out[(held_out["mode"] == mode) & (held_out.measured == "measured")]
        measured, itself = taken[taken.metric == "makespan"].value / 1e3, taken[taken.metric == "uncertainty"].value.median()
        worst = of.value.iloc[of.value.abs().argmax()]
        within = f"{(of.value.abs() <= BAR).sum()} of {len(of)}"
        span = f"{measured.min():.1f} … {measured.max():.1f}"
        made.add_row(mode, by, f"{of.value.median():+.1%}", f"{worst:+.1%}", within, span, f"{itself:.1%}")
    return made
