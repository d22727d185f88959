"""The simulator against the executor: the same chunks through both, by the measured profile and by the device fitted to it."""

import random
from dataclasses import asdict, dataclass, replace
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
from experiments.stages import Offline, measure_latency
from shadowattn.artifacts import Units
from shadowattn.graphs import GraphBank
from shadowattn.kernels import choose
from shadowattn.machine import cores, processor
from shadowattn.online.chunk import Chunk
from shadowattn.online.latency import LatencyProfile
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.plan import Group, Plan
from shadowattn.online.selection import Rule
from shadowattn.online.simulation import simulate
from shadowattn.online.simulation.device import ChunkShape, Device, Layer
from shadowattn.online.simulation.fit import fit_device
from shadowattn.reporting import simulation_figures
from shadowattn.reporting.rows import Row
from shadowattn.types import Heads

MODES = ("off", "overlap", "fused", "planned")
# What the issue of the simulator asks for.
BAR = 0.10
_ROUNDS = 15


@dataclass(frozen=True)
class CaseRow(Row):
    """A row about one case: `case` numbers it, `mode` is the pipeline's, `by` what the simulation went by."""

    case: int = 0
    mode: str = ""
    by: str = ""


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[CaseRow]:
    """Measured and simulated makespans of a dozen cases in every mode; those finished in `folder` are not measured again."""
    base = make_pipeline(setup.config)
    latency, _ = measure_latency(setup, bank, base)
    layer = Layer(setup.shape.heads, setup.shape.kv_heads, setup.shape.head_dim)
    fitted = fit_device(latency, layer, name=processor(), cores=cores())
    errors = ", ".join(f"{stage} {error:.1%}" for stage, error in fitted.errors.items())
    say(f"fitted device: median errors over the profile's points: {errors}")
    units, rows = Units(folder / "cells"), []
    common = CaseRow(**asdict(replace(
        study.common_row(setup, torch.zeros(0, 1)), path_kind="timing", unit="us", n=_ROUNDS, data="random tensors",
        corpus_sha256="", estimator="int8", estimate_device=setup.device.name,
    )))  # fmt: skip
    for number, case in enumerate(bar(_cases(setup, latency), "cases")):
        found = units.get(str(number), lambda case=case: _case(setup, bank, base, latency, fitted.device, layer, *case))
        row = replace(common, case=number, context_tokens=case[0], retention=sum(case[1]) / len(case[1]))
        for mode, values in found.items():
            rows.append(replace(row, mode=mode, metric="makespan", value=values["measured"]))
            for by in ("profile", "device"):
                simulated = replace(row, mode=mode, by=by, measured="simulated", n=1)
                rows.append(replace(simulated, metric="makespan", value=values[by]))
                error = values[by] / values["measured"] - 1
                rows.append(replace(simulated, metric="error", value=error, unit="1"))
    return rows + [
        replace(common, metric="fit_error", by="device", method=stage, value=error, unit="1", measured="simulated")
        for stage, error in fitted.errors.items()
    ]


def _cases(setup: Setup, latency: LatencyProfile) -> list[tuple[int, list[float]]]:
    """(keys, retention of every head): every fourth of the measured lengths, with retentions alike and different."""
    draw = random.Random(setup.config.seed)
    lengths = sorted({point.keys for point in latency.points})
    retentions = sorted({point.retention for point in latency.points if point.stage == "attend"})
    chosen = [lengths[round(at)] for at in np.linspace(len(lengths) // 4, len(lengths) - 1, 6)]
    heads = setup.shape.heads
    alike = [(keys, [0.2] * heads) for keys in chosen]
    return alike + [(keys, [draw.uniform(retentions[0], retentions[-1]) for _ in range(heads)]) for keys in chosen]


def _case(
    setup: Setup, bank: GraphBank, base: Pipeline, latency: LatencyProfile, device: Device, layer: Layer, keys: int,
    retention: list[float],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """By mode: the median makespan, and what both simulations say."""
    chunk = _chunk(setup, bank, keys, torch.tensor(retention, dtype=torch.float64))
    threads = base.budgets(setup.device.name)
    pipelines = {mode: Pipeline(mode, base.queue_heads, threads, base.scheduler, latency) for mode in MODES}
    ran = {mode: [] for mode in MODES}
    interleave(
        {mode: lambda mode=mode: ran[mode].append(pipelines[mode].run(chunk, keep_lists=False)) for mode in MODES},
        rounds=_ROUNDS, warmup=3,
    )  # fmt: skip
    groups = chunk.groups()
    single = sorted((Group((head,), group.bucket) for group in groups for head in group.heads), key=lambda g: g.heads)
    found = {}
    for mode in MODES:
        launches = single if mode in ("off", "overlap") else groups
        works = {"profile": latency.work(launches, retention, keys=keys)}
        capacity = _capacity(bank, chunk, keys)
        works["device"] = device.work(layer, ChunkShape(chunk.q.shape[1], capacity), launches, retention)
        works["device"] = replace(
            device.work(layer, ChunkShape(chunk.q.shape[1], keys), launches, retention), launches=works["device"].launches
        )
        in_order = Plan(tuple(range(len(launches))), tuple(head for group in launches for head in group.heads))
        made = {"measured": float(np.median([one.timeline.makespan_us for one in ran[mode][3:]]))}
        for by, work in works.items():
            plan = base.scheduler.plan(works["profile"]) if mode == "planned" else in_order
            how = {"mode": "off" if mode == "off" else "overlap", "queue_heads": base.queue_heads}
            made[by] = simulate(work, plan, cores=cores(), device=setup.device.name, **how).makespan_us
        found[mode] = made
    return found


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
    """By mode: the error of both simulations over the cases."""
    made = Table("mode", "simulated by", "median error", "worst", "within 10 %", "measured ms", title=title)
    errors = rows[rows.metric == "error"]
    for (mode, by), of in errors.groupby(["mode", "by"], sort=False):
        measured = rows[(rows["mode"] == mode) & (rows.measured == "measured")].value / 1e3
        worst = of.value.iloc[of.value.abs().argmax()]
        within = f"{(of.value.abs() <= BAR).sum()} of {len(of)}"
        span = f"{measured.min():.1f} … {measured.max():.1f}"
        made.add_row(mode, by, f"{of.value.median():+.1%}", f"{worst:+.1%}", within, span)
    return made
