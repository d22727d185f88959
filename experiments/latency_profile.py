"""The latency profile of a model's shape on this machine: what schedulers plan by and the simulator runs on."""

from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import torch
from rich.table import Table

from experiments import study
from experiments.progress import say
from experiments.setup import Setup, make_pipeline, part_name
from experiments.stages import Offline, measure_latency
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank
from shadowattn.online.latency import LatencyProfile
from shadowattn.reporting import pipeline_figures
from shadowattn.reporting.rows import StageRow


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[StageRow]:
    """Rows of every point (mean, median, p95) and of interpolation's error; the profile itself goes into the run's folder."""
    if len(setup.methods) != 1:
        raise InputError(f"compare: a latency profile is of one method, got {', '.join(setup.methods)}")
    profile, _ = measure_latency(setup, bank, make_pipeline(setup.config))
    path = profile.save(folder / "latency_profile.json")
    say(f"for a planned run: pipeline=planned pipeline.profile={path}")
    return _rows(setup, profile)


def _rows(setup: Setup, profile: LatencyProfile) -> list[StageRow]:
    method = setup.methods[setup.config.method]
    row = StageRow(**asdict(study.common_row(setup, torch.zeros(0, 1))))
    row = replace(
        row, method=setup.config.method, path_kind="timing", data="random tensors", corpus_sha256="", allocator="none", unit="us",
        estimator=part_name(method.estimator), estimate_device=setup.device.label, **method.selection,
    )  # fmt: skip
    made = []
    for point in profile.points:
        at = replace(
            row, stage=point.stage, launch_heads=point.heads, bucket=point.bucket, capacity=point.capacity, n=point.n,
            retention=point.retention, context_tokens=point.keys,
        )  # fmt: skip
        values = {"mean": point.mean_us, "median": point.median_us, "p95": point.p95_us}
        made += [replace(at, metric=metric, value=value) for metric, value in values.items()]
    for error in profile.errors():
        for kind in ("median", "worst"):
            metric = f"interpolation_error_over_{error.axis}_{kind}"
            made.append(replace(row, stage=error.stage, metric=metric, value=getattr(error, kind), unit="1", n=error.n))
    return made


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """Latency against keys, stage by stage."""
    pipeline_figures.latency(rows, folder / "latency_profile.png")


def table(rows: pd.DataFrame, title: str) -> Table:
    """Each stage at the longest keys, and what interpolation costs."""
    made = Table(
        "stage", "retention", "heads", "keys", "mean µs", "median µs", "p95 µs", "interpolation error (over)", title=title
    )
    for stage, of in rows.groupby("stage", sort=False):
        points = of[(of.metric == "median") & (of.context_tokens == of[of.metric == "median"].context_tokens.max())]
        errors = of[of.metric.str.endswith("_median")]
        texts = [f"{row.value:.1%} ({row.metric.split('_')[3]})" for row in errors.itertuples()]
        for (retention, heads), cell in points.groupby(["retention", "launch_heads"]):
            same = (of.retention == retention) & (of.launch_heads == heads) & (of.context_tokens == cell.context_tokens.iloc[0])
            mean, p95 = (of[same & (of.metric == metric)].value.median() for metric in ("mean", "p95"))
            line = (f"{retention:g}", str(heads), str(cell.context_tokens.iloc[0]))
            line += (f"{mean:.0f}", f"{cell.value.median():.0f}", f"{p95:.0f}")
            made.add_row(str(stage), *line, ", ".join(texts))
            stage, texts = "", []
    return made
