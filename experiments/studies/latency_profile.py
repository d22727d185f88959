"""The latency profile of a model's shape on this machine: what schedulers plan by and the simulator runs on."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from experiments.lab import Lab
from experiments.part_building import part_name
from experiments.progress import say
from experiments.studies.latency import LatencyStudy
from shadowattn.online.latency import LatencyProfile
from shadowattn.reporting.figures.latency_profile import draw as draw_latency_profile
from shadowattn.reporting.rows import StageRow


@dataclass(frozen=True)
class MeasureLatency(LatencyStudy):
    """Every point of the profile, and what interpolation between them costs."""

    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "method", "estimator", "selection", "calibration", "key_offset", "grid"),
        *("graphs", "device", "kernel", "pipeline", "threads"),
    )
    headline: ClassVar[tuple[str, ...]] = ("median",)

    def measure(self, lab: Lab) -> list[StageRow]:
        """Rows of every point (mean, median, p95) and of interpolation's error; the profile itself goes into the run's folder."""
        profile, _ = self.measure_profile(lab)
        path = profile.save(lab.folder / "latency_profile.json")
        say(f"for a planned run: pipeline=planned pipeline.profile={path}")
        return _rows(lab, profile)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"latency_profile": draw_latency_profile(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """Each stage at the longest keys, and what interpolation costs."""
        table = Table(
            "stage", "retention", "heads", "keys", "mean µs", "median µs", "p95 µs", "interpolation error (over)", title=title
        )
        for stage, stage_rows in rows.groupby("stage", sort=False):
            points = stage_rows[
                (stage_rows.metric == "median")
                & (stage_rows.context_tokens == stage_rows[stage_rows.metric == "median"].context_tokens.max())
            ]
            errors = stage_rows[stage_rows.metric.str.endswith("_median")]
            texts = [f"{row.value:.1%} ({row.metric.split('_')[3]})" for row in errors.itertuples()]
            for (retention, heads), cell in points.groupby(["retention", "launch_heads"]):
                same = (
                    (stage_rows.retention == retention)
                    & (stage_rows.launch_heads == heads)
                    & (stage_rows.context_tokens == cell.context_tokens.iloc[0])
                )
                mean, p95 = (stage_rows[same & (stage_rows.metric == metric)].value.median() for metric in ("mean", "p95"))
                line = (f"{retention:g}", str(heads), str(cell.context_tokens.iloc[0]))
                line += (f"{mean:.0f}", f"{cell.value.median():.0f}", f"{p95:.0f}")
                table.add_row(str(stage), *line, ", ".join(texts))
                stage, texts = "", []
        return table


def _rows(lab: Lab, profile: LatencyProfile) -> list[StageRow]:
    row = replace(
        lab.timing_row(StageRow), method=lab.main.name, unit="us", estimator=part_name(lab.main.estimator),
        estimate_device=lab.device.label, **lab.main.selection,
    )  # fmt: skip
    rows = []
    for point in profile.points:
        at = replace(
            row, stage=point.stage, launch_heads=point.heads, bucket=point.bucket, capacity=point.capacity, n=point.n,
            retention=point.retention, context_tokens=point.keys,
        )  # fmt: skip
        values = {"mean": point.mean_us, "median": point.median_us, "p95": point.p95_us}
        rows += [replace(at, metric=metric, value=value) for metric, value in values.items()]
    for error in profile.errors():
        for kind in ("median", "worst"):
            metric = f"interpolation_error_over_{error.axis}_{kind}"
            rows.append(replace(row, stage=error.stage, metric=metric, value=getattr(error, kind), unit="1", n=error.n))
    return rows
