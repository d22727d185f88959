"""Fig. 9 of the paper, measured: the heads of one layer through the pipeline in all four ways, on a real model's prompt."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from rich.table import Table

from benchmarks.interleave import interleave
from experiments import study
from experiments.progress import say
from experiments.setup import Setup, make_pipeline, needs_bank, part_name, rule_options
from experiments.stages import Offline, make_profile, measure_latency
from shadowattn.artifacts import write_json
from shadowattn.evaluation.perplexity import window_losses
from shadowattn.graphs import GraphBank
from shadowattn.kernels import choose
from shadowattn.method import attach
from shadowattn.online.attention import Attended
from shadowattn.online.chunk import Chunk
from shadowattn.online.pipeline import MODES, Pipeline
from shadowattn.online.stages import Parts, Stages
from shadowattn.online.timeline import STAGES, Timeline, chrome_trace
from shadowattn.reporting import pipeline_figures
from shadowattn.reporting.rows import StageRow
from shadowattn.types import RetentionProfile

_ROUNDS = 25


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[StageRow]:
    """Rows of every way's times, and the spans of its median round; the same spans in `trace.json` for a trace viewer."""
    base = make_pipeline(setup.config)
    latency, path = measure_latency(setup, bank, base)
    say(f"latency profile: {path}")
    profile = make_profile(setup, offline, setup.methods[setup.config.method].allocator, setup.retentions[0])
    chunk, parts = _last_chunk(setup, bank, profile)
    say(f"layer {chunk.layer}: retentions {', '.join(f'{r:.3g}' for r in chunk.retention.tolist())} on {chunk.keys} keys")
    threads = base.budgets(setup.device.name)  # the same for all, so that the pictures differ in one thing at a time
    pipelines = {mode: Pipeline(mode, base.queue_heads, threads, base.scheduler, latency) for mode in MODES if mode != "batched"}
    pipelines["batched"] = Pipeline()
    ran = {mode: [] for mode in pipelines}

    def call(mode: str) -> None:
        ran[mode].append(pipelines[mode].run(Stages(chunk.rewound(), parts), keep_lists=False))

    calls = {mode: partial(call, mode) for mode in pipelines}
    timings = interleave(calls, rounds=_ROUNDS, warmup=3)
    row = _row(setup, chunk)
    made, traces = [], {}
    for mode, timing in timings.items():
        timelines = [one.timeline for one in ran[mode][-_ROUNDS:]]
        low, high = timing.quartiles_s
        at = replace(row, method=mode)
        made += [
            replace(at, metric=metric, value=value * 1e3)
            for metric, value in {"wall_time": timing.median_s, "wall_time_low": low, "wall_time_high": high}.items()
        ]
        if mode != "batched":  # whose spans are of many heads at once
            traces[mode] = sorted(timelines, key=lambda timeline: timeline.makespan_us)[len(timelines) // 2]
            made += _timeline_rows(at, timelines, traces[mode])
    write_json(folder / "trace.json", chrome_trace(traces))
    return made


def _last_chunk(setup: Setup, bank: GraphBank | None, profile: RetentionProfile) -> tuple[Chunk, Parts]:
    """The last chunk of a held-out prompt in the layer whose sparse heads are the most, and differ the most in retention."""
    sparse = [[r for r in layer if r < setup.dense_above(1)] for layer in profile.retention]
    layer = max(range(len(sparse)), key=lambda i: (len(sparse[i]), max(sparse[i], default=0) - min(sparse[i], default=0)))
    method = setup.methods[setup.config.method]
    estimator = instantiate(method.estimator, **({"bank": bank} if needs_bank(method.estimator) else {}))
    seen: list[Attended] = []

    def observe(attended: Attended) -> None:
        if attended.chunk.layer == layer and attended.selection is not None:
            seen[:] = [attended]

    options = {"estimator": estimator, "chunk_tokens": setup.config.graphs.chunk_tokens, "kernel": setup.kernel}
    options |= {"dense_above": setup.dense_above(1), **rule_options(method.selection)}
    with attach(setup.loaded.model, profile, None, observers=(observe,), **options):
        window_losses(setup.loaded.model, setup.heldout()[:1], chunk_tokens=setup.config.graphs.chunk_tokens)
    (last,) = seen
    kernels = choose(setup.kernel, head_dim=last.chunk.q.shape[2], dtype=last.chunk.q.dtype)
    return last.chunk, Parts(estimator, last.rule, kernels)


def _row(setup: Setup, chunk: Chunk) -> StageRow:
    method = setup.methods[setup.config.method]
    return replace(
        StageRow(**asdict(study.common_row(setup, torch.zeros(0, 1)))), path_kind="timing", unit="ms", n=_ROUNDS,
        retention=float(chunk.retention.mean()), layer=chunk.layer, allocator=part_name(method.allocator),
        estimator=part_name(method.estimator), estimate_device=setup.device.label, context_tokens=chunk.keys,
        **method.selection,
    )  # fmt: skip


def _timeline_rows(row: StageRow, timelines: list[Timeline], shown: Timeline) -> list[StageRow]:
    made = [replace(row, metric="makespan", value=float(np.median([t.makespan_us for t in timelines])) / 1e3)]
    for stage in STAGES:
        busy = float(np.median([timeline.busy_us(stage) for timeline in timelines]))
        made.append(replace(row, metric="busy", stage=stage, value=busy / 1e3))
    for span in shown.spans:
        heads = " ".join(map(str, span.heads))
        took, start = (span.end_us - span.start_us) / 1e3, span.start_us / 1e3
        made.append(replace(row, metric="span", stage=span.stage, heads=heads, value=took, start=start, bytes=span.bytes, n=1))
    return made


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """The four panels."""
    pipeline_figures.gantt(rows, folder / "fig9.png")


def table(rows: pd.DataFrame, title: str) -> Table:
    """A line for each way: its time, and what each stage was busy for."""
    made = Table("pipeline", "wall ms", "quartiles", "makespan ms", *(f"{stage} busy" for stage in STAGES), title=title)
    for method, of in rows.groupby("method", sort=False):
        one = of[of.stage == ""].set_index("metric").value
        busy = of[of.metric == "busy"].set_index("stage").value
        spread = f"{one.wall_time_low:.2f} … {one.wall_time_high:.2f}"
        cells = [f"{busy[stage]:.2f}" if stage in busy else "" for stage in STAGES]
        made.add_row(str(method), f"{one.wall_time:.2f}", spread, f"{one.makespan:.2f}" if "makespan" in one else "", *cells)
    return made
