"""Figures of the pipeline: what ran when, and what each stage takes. Pure functions of rows."""

import matplotlib
import matplotlib.patches
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowattn.online.timeline import STAGES
from shadowattn.reporting.figures import new_figure


def gantt(rows: pd.DataFrame) -> Figure:
    """A panel for every method: one line a stage, one bar a launch or head, coloured by head; Fig. 9 of the paper."""
    spans = rows[rows.metric == "span"]
    methods = list(spans.method.unique())
    took = rows[rows.metric.str.startswith("wall_time")].set_index(["method", "metric"])
    everyone = sorted({head for heads in spans.heads for head in _heads(heads)})
    colors = {head: matplotlib.colormaps["viridis"](i / max(len(everyone) - 1, 1)) for i, head in enumerate(everyone)}
    drawn, axes = new_figure(columns=2, rows=(len(methods) + 1) // 2)
    last = (spans.start + spans.value).max()
    for axis, method in zip(axes.flat, methods, strict=False):
        _panel(axis, spans[spans.method == method], colors)
        wall, low, high = (took.value[method, f"wall_time{end}"] for end in ("", "_low", "_high"))
        axis.set(xlim=(0, last * 1.02), xlabel="ms from the start of the call")
        axis.set_title(f"{method}: {wall:.1f} ms a call, median (quartiles {low:.1f} to {high:.1f})", fontsize=8)
    for axis in axes.flat[len(methods) :]:
        axis.axis("off")
    handles = [matplotlib.patches.Patch(color=color, label=f"head {head}") for head, color in colors.items()]
    drawn.legend(handles=handles, loc="outside lower center", ncol=min(8, len(handles)), fontsize=7)
    first = spans.iloc[0]
    drawn.suptitle(
        f"{first.model}, layer {first.layer}, {first.context_tokens} keys, mean retention {first.retention:.3g} · "
        f"{first.measured}, n = {took.n.iloc[0]} calls each, shown: that of median span · INT8 estimate on "
        f"{first.estimate_device}, kernel {first.kernel}",
        fontsize=8,
    )
    return drawn


def _panel(axis: Axes, spans: pd.DataFrame, colors: dict) -> None:
    for span in spans.itertuples():
        line = len(STAGES) - 1 - STAGES.index(span.stage)
        heads = _heads(span.heads)
        for place, head in enumerate(heads):  # a grouped launch is a bar with a stripe for each of its heads
            height = 0.8 / len(heads)
            bottom = line - 0.4 + place * height
            axis.broken_barh([(span.start, span.value)], (bottom, height), facecolors=colors[head], edgecolor="w", linewidth=0.4)
    axis.set_yticks(range(len(STAGES)), list(reversed(STAGES)))


def _heads(text: str) -> list[int]:
    return [int(head) for head in str(text).split()]


def latency(rows: pd.DataFrame) -> Figure:
    """Median latency of every stage against keys, p95 dotted: launches by their heads, the others by retention."""
    points = rows[rows.metric.isin(["median", "p95"])]
    drawn, axes = new_figure(columns=3)
    for axis, stage in zip(axes, STAGES, strict=True):
        by = "launch_heads" if stage == "estimate" else "retention"
        for color, (name, group) in enumerate(points[points.stage == stage].groupby(by)):
            # Buckets of one shape are the same work on a CPU: their median, and the highest p95.
            median = group[group.metric == "median"].groupby("context_tokens").value.median()
            p95 = group[group.metric == "p95"].groupby("context_tokens").value.max()
            label = f"{name} head{'s' * (name > 1)} a launch" if stage == "estimate" else f"retention {name:g}"
            axis.plot(median.index, median / 1e3, marker="o", markersize=3, color=f"C{color}", label=label)
            axis.plot(p95.index, p95 / 1e3, linestyle=":", linewidth=1, color=f"C{color}")
        axis.set(xlabel="keys", ylabel="ms (dotted: p95)", title=stage, ylim=(0, None))
        axis.legend(fontsize=7)
    first, least, most = points.iloc[0], points.n.min(), points.n.max()
    calls = f"n = {least} calls" if least == most else f"n = {least} to {most} calls"
    drawn.suptitle(
        f"{first.model}: a launch, and one head's selection and attention, alone, {calls} a point · {first.measured}, "
        f"INT8 estimate on {first.estimate_device}, kernel {first.kernel}",
        fontsize=9,
    )
    return drawn


def modes(rows: pd.DataFrame) -> Figure:
    """Median time of every mode with its quartiles, a panel for each number of keys, by the layer's shape."""
    times = rows[rows.metric == "time"]
    lengths, methods = sorted(times.context_tokens.unique()), list(times.method.unique())
    drawn, axes = new_figure(columns=len(lengths))
    for axis, keys in zip(np.atleast_1d(axes), lengths, strict=True):
        for index, (shape, of) in enumerate(times[times.context_tokens == keys].groupby("model", sort=False)):
            of = of.set_index("method").reindex(methods)
            places = np.arange(len(methods)) + 0.2 * (index - 0.5)
            reach = [of.value - of.low, of.high - of.value]
            axis.errorbar(of.value, places, xerr=reach, linestyle="none", marker="os"[index % 2], markersize=4, label=shape)
        axis.set_yticks(range(len(methods)), methods if keys == lengths[0] else [], fontsize=7)
        axis.grid(axis="y", color="0.9")
        axis.invert_yaxis()
        axis.set(xlabel="ms", xlim=(0, None))
        axis.set_title(f"{keys} keys", fontsize=9)
    drawn.legend(*np.atleast_1d(axes)[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    first = times.iloc[0]
    what = f"{first.chunk_rows} rows, mean retention {first.retention:g}, random tensors"
    drawn.suptitle(f"{what}\nmedians, quartiles of n = {first.n} calls · measured, kernel {first.kernel}", fontsize=8)
    return drawn
