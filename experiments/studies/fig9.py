"""Fig. 9 of the paper, measured: the heads of one layer through the pipeline in all four ways, on a real model's prompt."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from experiments.cells import estimator_of
from experiments.lab import Lab
from experiments.part_building import part_name
from experiments.progress import say
from experiments.refusals import check_count
from experiments.studies.latency import LatencyStudy
from shadowattn.artifacts import write_json
from shadowattn.evaluation.perplexity import window_losses
from shadowattn.interleave import interleave
from shadowattn.kernels import choose
from shadowattn.method import attach
from shadowattn.online.attention import Attended
from shadowattn.online.chunk import Chunk
from shadowattn.online.pipeline import MODES, Pipeline
from shadowattn.online.stages import Parts, Stages
from shadowattn.online.timeline import STAGES, Timeline, chrome_trace
from shadowattn.reporting.figures.fig9 import draw as draw_fig9
from shadowattn.reporting.rows import StageRow
from shadowattn.types import RetentionProfile


@dataclass(frozen=True)
class Fig9(LatencyStudy):
    """Medians of `rounds` interleaved calls; the spans are those of the round of median makespan."""

    rounds: int = 25
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "method", "retention", "estimator", "allocator", "selection", "importance"),
        *("sensitivity", "calibration", "key_offset", "grid", "graphs", "device", "kernel", "dense_above", "pipeline"),
        *("scheduler", "threads"),
    )
    headline: ClassVar[tuple[str, ...]] = ("wall_time", "makespan")

    def __post_init__(self):
        super().__post_init__()
        check_count("study.rounds", self.rounds)

    def measure(self, lab: Lab) -> list[StageRow]:
        """Rows of every way's times, and the spans of its median round; the same spans in `trace.json` for a trace viewer."""
        base = lab.pipeline
        latency, path = self.measure_profile(lab)
        say(f"latency profile: {path}")
        chunk, parts = _last_chunk(lab, lab.offline.profile(lab.main.allocator, lab.retentions[0]))
        say(f"layer {chunk.layer}: retentions {', '.join(f'{r:.3g}' for r in chunk.retention.tolist())} on {chunk.keys} keys")
        threads = base.budgets(lab.device.name)  # the same for all, so that the pictures differ in one thing at a time
        pipelines = {
            mode: Pipeline(mode, base.queue_heads, threads, base.scheduler, latency) for mode in MODES if mode != "batched"
        }
        pipelines["batched"] = Pipeline()
        ran = {mode: [] for mode in pipelines}

        def call(mode: str) -> None:
            ran[mode].append(pipelines[mode].run(Stages(chunk.rewound(), parts), keep_lists=False))

        calls = {mode: partial(call, mode) for mode in pipelines}
        timings = interleave(calls, rounds=self.rounds, warmup=3)
        row = self._row(lab, chunk)
        rows, traces = [], {}
        for mode, timing in timings.items():
            timelines = [one.timeline for one in ran[mode][-self.rounds :]]
            low, high = timing.quartiles_s
            at = replace(row, method=mode, scheduler=part_name(lab.of("scheduler")) if mode == "planned" else "")
            rows += [
                replace(at, metric=metric, value=value * 1e3)
                for metric, value in {"wall_time": timing.median_s, "wall_time_low": low, "wall_time_high": high}.items()
            ]
            if mode != "batched":  # whose spans are of many heads at once
                traces[mode] = sorted(timelines, key=lambda timeline: timeline.makespan_us)[len(timelines) // 2]
                rows += _timeline_rows(at, timelines, traces[mode])
        write_json(lab.folder / "trace.json", chrome_trace(traces))
        return rows

    def _row(self, lab: Lab, chunk: Chunk) -> StageRow:
        return replace(
            lab.row(StageRow), dense_above=lab.dense_above(lab.main.rule, lab.main.look), path_kind="timing",
            unit="ms", n=self.rounds, retention=float(chunk.retention.mean()),
            layer=chunk.layer, allocator=part_name(lab.main.allocator), estimator=part_name(lab.main.estimator),
            estimate_device=lab.device.label, context_tokens=chunk.keys, **lab.main.selection,
        )  # fmt: skip

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"fig9": draw_fig9(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """A line for each way: its time, and what each stage was busy for."""
        table = Table("pipeline", "wall ms", "quartiles", "makespan ms", *(f"{stage} busy" for stage in STAGES), title=title)
        for method, method_rows in rows.groupby("method", sort=False):
            one = method_rows[method_rows.stage == ""].set_index("metric").value
            busy = method_rows[method_rows.metric == "busy"].set_index("stage").value
            spread = f"{one.wall_time_low:.2f} … {one.wall_time_high:.2f}"
            cells = [f"{busy[stage]:.2f}" if stage in busy else "" for stage in STAGES]
            makespan = f"{one.makespan:.2f}" if "makespan" in one else ""
            table.add_row(str(method), f"{one.wall_time:.2f}", spread, makespan, *cells)
        return table


def _last_chunk(lab: Lab, profile: RetentionProfile) -> tuple[Chunk, Parts]:
    """The last chunk of a held-out prompt in the layer whose sparse heads are the most, and differ the most in retention."""
    limit = lab.dense_above(lab.main.rule, lab.main.look)
    sparse = [[r for r in layer if r < limit] for layer in profile.retention]
    layer = max(range(len(sparse)), key=lambda i: (len(sparse[i]), max(sparse[i], default=0) - min(sparse[i], default=0)))
    estimator, chunk_tokens = estimator_of(lab, lab.main, profile), lab.of("graphs").chunk_tokens
    seen: list[Attended] = []

    def observe(attended: Attended) -> None:
        if attended.chunk.layer == layer and attended.selection is not None:
            seen[:] = [attended]

    options = {"estimator": estimator, "chunk_tokens": chunk_tokens, "kernel": lab.kernel}
    options |= {"dense_above": limit, **lab.main.rule_options}
    with attach(lab.loaded.model, profile, None, observers=(observe,), **options):
        window_losses(lab.loaded.model, lab.heldout()[:1], chunk_tokens=chunk_tokens)
    (last,) = seen
    kernels = choose(lab.kernel, head_dim=last.chunk.q.shape[2], dtype=last.chunk.q.dtype)
    return last.chunk, Parts(estimator, last.rule, kernels)


def _timeline_rows(row: StageRow, timelines: list[Timeline], shown: Timeline) -> list[StageRow]:
    rows = [replace(row, metric="makespan", value=float(np.median([t.makespan_us for t in timelines])) / 1e3)]
    for stage in STAGES:
        busy = float(np.median([timeline.busy_us(stage) for timeline in timelines]))
        rows.append(replace(row, metric="busy", stage=stage, value=busy / 1e3))
    for span in shown.spans:
        heads = " ".join(map(str, span.heads))
        took, start = (span.end_us - span.start_us) / 1e3, span.start_us / 1e3
        rows.append(replace(row, metric="span", stage=span.stage, heads=heads, value=took, start=start, bytes=span.bytes, n=1))
    return rows
