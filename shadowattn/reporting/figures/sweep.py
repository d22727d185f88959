"""All jobs of a sweep in one figure."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowattn.reporting.cases import cells
from shadowattn.reporting.style import MARKERS, attending_to_all, new_figure

_MOST_PANELS = 6


def draw(rows: pd.DataFrame, metric: str) -> Figure:
    """One metric of every job of a sweep, a panel for each case and a line for each method.

    Values are drawn against the retention where it differs, else by job. Methods that attend to every key, dense attention among
    them, are levels: one, or one for each job.
    """
    metric_rows = rows[rows.metric == metric]
    table = cells(rows, [metric], _MOST_PANELS)
    jobs = list(dict.fromkeys(table.values.job))
    whole = {"dense", *attending_to_all(metric_rows).method}
    by_retention = table.values[~table.values.method.isin(whole)].retention.nunique() > 1
    panels = list(table.values.groupby(table.cases, sort=False)) if table.cases else [((), table.values)]
    columns = min(3, len(panels))
    columns = 2 if columns == 1 and len(jobs) > 4 else columns  # room for the legend, and for long names
    drawn, axes = new_figure(columns=columns, rows=-(-len(panels) // columns))
    every = list(np.atleast_1d(axes).flat)
    for axis, (case, values) in zip(every, panels, strict=False):
        _panel(axis, values, jobs, whole, by_retention)
        axis.set_title(
            ", ".join(f"{name.replace('_', ' ')} {one}" for name, one in zip(table.cases, case, strict=True)), fontsize=8
        )
    for axis in every[len(panels) :]:
        axis.axis("off")
    unit = metric_rows.unit.iloc[0]
    drawn.supylabel(metric.replace("_", " ") + (f" ({unit})" if unit != "1" else ""), fontsize=9)
    handles = {label: handle for axis in drawn.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), fontsize=7, loc="outside right upper")
    drawn.suptitle(" · ".join(_said(metric_rows, table.pooled, bool(table.values.low.notna().any()))), fontsize=8)
    return drawn


def _panel(axis: Axes, values: pd.DataFrame, jobs: list[str], whole: set[str], by_retention: bool) -> None:
    levels = values[values.method.isin(whole)]
    lines = values[~values.method.isin(whole)]
    if not by_retention:
        lines, levels = pd.concat([lines, levels]), levels[:0]
        axis.set_xticks(range(len(jobs)), jobs, rotation=20, ha="right", fontsize=7)
    else:
        axis.set(xlabel="retention (kept fraction of visible keys)")
    # At one retention a method has several values where jobs differ in something else.
    several = by_retention and lines.duplicated(["method", "retention"]).any()
    for marker, (name, line) in zip(
        MARKERS * 9, lines.groupby(["method", *(["job"] if several else [])], sort=False), strict=False
    ):
        line = line.sort_values("retention") if by_retention else line
        x = line.retention if by_retention else [jobs.index(job) for job in line.job]
        reach = None if line.low.isna().all() else np.maximum(0, [line.value - line.low, line.high - line.value])
        axis.errorbar(x, line.value, yerr=reach, marker=marker, markersize=4, capsize=2, label=" ".join(map(str, name)))
    for index, (label, value) in enumerate(_levels(levels)):
        axis.axhline(value, color=str(0.2 + 0.1 * (index % 5)), linestyle=("--", ":", "-.")[index % 3], label=label)


def _levels(rows: pd.DataFrame) -> Iterator[tuple[str, float]]:
    """A level for each method, or for each job of it where jobs differ."""
    for method, method_rows in rows.groupby("method", sort=False):
        if method_rows.value.nunique() == 1:
            yield str(method), method_rows.value.iloc[0]
        else:
            yield from ((f"{method} {job}", value) for job, value in zip(method_rows.job, method_rows.value, strict=True))


def _said(rows: pd.DataFrame, pooled: list[str], has_intervals: bool) -> Iterator[str]:
    """What a title says of the rows."""
    if set(rows.measured) == {"compiled"}:
        yield "COMPILED, not run"
    if set(rows.measured) == {"simulated"}:
        devices = sorted(set(rows.device)) if "device" in rows else []
        yield " ".join(["SIMULATED:", *devices] if devices else ["SIMULATED"])
    models = sorted(set(rows.model))
    yield ", ".join(models) if len(models) <= 3 else f"{len(models)} models"
    yield f"n = {' to '.join(dict.fromkeys([str(rows.n.min()), str(rows.n.max())]))}"
    if pooled:
        yield f"medians over {', '.join(name.replace('_', ' ') for name in pooled)}"
    if has_intervals:
        yield "bars: intervals or standard errors of the rows"
