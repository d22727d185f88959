"""Fig. 9 of the paper: what ran when, in every mode of the pipeline."""

import matplotlib
import matplotlib.patches
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowattn.online.timeline import STAGES
from shadowattn.reporting.style import (
    new_figure,
)


def draw(rows: pd.DataFrame) -> Figure:
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
