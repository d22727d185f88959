"""The pipeline's modes against the plain path, side by side: `python -m benchmarks.pipeline`, about three minutes on two cores.

One chunk of 256 rows at the end of 1024 to 8192 keys; heads of different scales, so that they fall into several buckets of
the bank, and of different retentions, 0.2 on average. Candidates take turns in one process; times are medians with
quartiles. Tensors are random. Rows go to results/benchmarks/pipeline.csv.
"""

from __future__ import annotations

import argparse
import os
import sys

# As in experiments: libgomp's spinning threads would fight OpenVINO's for the cores. Read once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.attention import BenchmarkRow, row
from benchmarks.candidates import SHAPES, Case, Tensors
from benchmarks.interleave import interleave, ratio
from experiments.provenance import called, origin, write_csv
from shadowattn.artifacts import content_hash
from shadowattn.graphs import GraphBank, GraphShape
from shadowattn.graphs.planner import launch_sizes
from shadowattn.graphs.symmetric_int8 import absmax_scales
from shadowattn.kernels import choose
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8 import Int8
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.executor import Threads
from shadowattn.online.latency import LatencyProfile
from shadowattn.online.latency_profiler import LatencyProfiler
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.schedulers.local_search import LocalSearch
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.types import RetentionProfile, ScaleGrid

MODELS, KEYS, ROWS = ("qwen2-0.5b", "qwen2-1.5b"), (1024, 4096, 8192), 256
OUT = Path("results/benchmarks/pipeline.csv")


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
        built = Int8(GraphBank.build(profile, tuple(GraphShape(n, case.rows, dim, case.keys, group=n) for n in sizes)))
    retention = torch.linspace(0.5, 1.5, heads, dtype=torch.float64)[order.flip(0)] * case.retention
    kernels = choose("native", head_dim=dim, dtype=q.dtype)
    return Chunk.of(q, k, t.v, retention=retention, scale=t.scale), Parts(built, Rule(), kernels)


def candidates(chunk: Chunk, parts: Parts, scheduler) -> dict:
    """A call for each mode that makes sense for the estimator."""
    modes = {mode: Pipeline(mode) for mode in ("batched", "off", "overlap")}
    if not parts.estimator.selects:
        threads = Threads(1, 1, 1)
        modes |= {
            "overlap, all cores each": Pipeline("overlap", threads=Threads(*(torch.get_num_threads(),) * 3)),
            "fused": Pipeline("fused"),
            "planned": Pipeline("planned", threads=threads, scheduler=scheduler, profile=measure_profile(chunk, parts, threads)),
        }
    return {name: partial(_call, pipeline, chunk, parts) for name, pipeline in modes.items()}


def _call(pipeline: Pipeline, chunk: Chunk, parts: Parts) -> None:
    pipeline.run(Stages(chunk.rewound(), parts), keep_lists=False)


def measure_profile(chunk: Chunk, parts: Parts, threads: Threads) -> LatencyProfile:
    """At the chunk's own keys alone."""
    (heads, rows, dim), (groups, keys, _) = chunk.q.shape, chunk.k.shape
    probe = LatencyProfiler(heads, groups, dim, rows, chunk.q.dtype, parts.estimator, parts.rule, parts.kernels, threads)
    lowest, highest = chunk.retention.min().item(), chunk.retention.max().item()
    return LatencyProfile(
        probe.binding(), tuple(probe.measure(keys, (lowest, chunk.retention.mean().item(), highest), repeats=5))
    )


def measure(models: list[str], keys: list[int], rounds: int, scheduler) -> Iterator[BenchmarkRow]:
    cases = [
        (estimator, Case(model, torch.float32, n, ROWS, 0.2))
        for model in models
        for n in keys
        for estimator in ("int8", "int8_fused")
    ]
    for estimator, case in tqdm(cases, disable=not sys.stderr.isatty(), leave=False):
        timings = interleave(candidates(*make_chunk(case, estimator), scheduler), rounds=rounds, warmup=3)
        device = "CPU" if estimator == "int8" else "none"
        for mode, timing in timings.items():
            one = row(estimator, case, f"{estimator} {mode}", "time", timing.median_s * 1e3, "ms", timing)
            one = replace(one, experiment="benchmark_pipeline", estimate_device=device)
            yield one
            faster = ratio(timings["batched"], timing)
            yield replace(one, metric="times faster than batched", value=faster, unit="1", low=faster, high=faster)


def table(rows: pd.DataFrame) -> Table:
    """Times with quartiles, and ratios to the plain path of the same estimator."""
    title = f"pipeline · {rows.processor.iloc[0]}, {rows.threads.iloc[0]} threads, {rows.kernel.iloc[0]} · measured"
    made = Table("case", "pipeline", "ms", "quartiles", "× batched", title=title)
    for (model, keys, part), cell in rows.groupby(["model", "keys", "part"], sort=False):
        case = f"{model} {keys} keys, {part}"
        for name, values in cell.groupby("method", sort=False):
            time, faster = values[values.metric == "time"].iloc[0], values[values.metric != "time"].iloc[0]
            mode = str(name).removeprefix(f"{part} ")
            made.add_row(case, mode, f"{time.value:.2f}", f"{time.low:.2f} … {time.high:.2f}", f"{faster.value:.2f}")
            case = ""
        made.add_section()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--keys", nargs="+", type=int, default=list(KEYS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    began = datetime.now(UTC)
    rows = pd.DataFrame([asdict(one) for one in measure(options.shape, options.keys, options.rounds, LocalSearch())])
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    write_csv(rows, options.out, origin(called("benchmarks.pipeline"), content_hash(settings), began))
    Console(width=None if sys.stdout.isatty() else 130).print(table(rows))


if __name__ == "__main__":
    main()
