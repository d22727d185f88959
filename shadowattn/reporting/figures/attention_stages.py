"""Where the time of whole sparse paths goes, stage by stage."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.figures.attention_speed import caption
from shadowattn.reporting.style import new_figure

# How the metrics of stages begin, and the one of what is in no stage: quantising, packing, and threads that wait for others.
STAGE, OUTSIDE = "stage: ", "outside of tasks"
_COLOURS = {
    "first look": "tab:purple",
    "let through": "tab:pink",
    "estimate": "tab:blue",
    "select": "tab:orange",
    "attend together": "tab:green",
    "attend alone": "tab:olive",
    "spared heads": "tab:red",
    OUTSIDE: "0.7",
}
_NAMES = {"total (int8_fused), per row": "per row", "total (hierarchical), per row": "first look"}


def draw(rows: pd.DataFrame) -> Figure:
    """Stacked times of the stages of each path, a panel a shape and dtype, a bar a path and retention; our dense attention is a
    line."""
    rows = rows[rows.part == "stages"]
    shapes, dtypes, retentions = rows["model"].unique(), rows.dtype.unique(), sorted(rows.retention.unique())
    figure, axes = new_figure(columns=len(shapes), rows=len(dtypes))
    axes = np.array(axes).reshape(len(dtypes), len(shapes))
    paths = [name for name in rows.method.unique() if name != "own dense"]
    for line, dtype in enumerate(dtypes):
        for column, shape in enumerate(shapes):
            axis, cell = axes[line, column], rows[(rows["model"] == shape) & (rows.dtype == dtype)]
            values = cell.set_index(["method", "retention", "metric"]).value
            bars = [(name, at) for name in paths for at in retentions]
            places = np.arange(len(bars)) + np.repeat(np.arange(len(paths)), len(retentions))  # a gap between paths
            bottom = np.zeros(len(bars))
            for stage, colour in _COLOURS.items():
                heights = np.array([values.get((name, at, STAGE + stage), 0.0) for name, at in bars])
                axis.bar(places, heights, bottom=bottom, color=colour, label=stage, width=0.85)
                bottom += heights
            axis.axhline(cell[(cell.method == "own dense")].value.median(), color="0.3", linestyle="--", label="own dense")
            axis.set_xticks(places, [f"{at:.0%}" if at * 100 % 1 == 0 else f"{at:.1%}" for _, at in bars], fontsize=6)
            for index, name in enumerate(paths):
                middle = places[index * len(retentions) : (index + 1) * len(retentions)].mean()
                called = _NAMES.get(name, name.split(", ")[1])
                axis.text(middle, -0.13, called, ha="center", va="top", fontsize=7, transform=axis.get_xaxis_transform())
            axis.set_title(f"{shape}, {dtype}", fontsize=9)
            axis.set_ylabel("ms" if not column else "")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    first = rows.iloc[0]
    figure.supxlabel(f"retention ({first.context_tokens} keys, chunk of {first.chunk_rows} queries)", fontsize=9)
    figure.suptitle(caption(rows), fontsize=8)
    return figure
