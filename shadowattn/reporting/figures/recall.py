"""Table 4 of the paper: recall of the exact top-k, by estimate and by head."""

import matplotlib.ticker
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.paper import TABLE_4, TABLE_4_RETENTIONS
from shadowattn.reporting.style import (
    MARKERS,
    new_figure,
)

_COLOURS = 10  # of matplotlib's cycle


def draw(rows: pd.DataFrame) -> Figure:
    """Keys missed against retention, per row and pooled, the paper's values in grey; every head of the first estimate."""
    drawn, axes = new_figure(columns=2, rows=2)
    axes = axes.flat
    for axis, granularity in zip(axes, ("row", "pooled"), strict=False):
        recalls = rows[(rows.metric == "recall") & (rows.granularity == granularity)]
        for index, (name, line) in enumerate(recalls.groupby("method", sort=False)):
            line = line.sort_values("retention")
            look = {"marker": MARKERS[index % len(MARKERS)], "color": f"C{index % _COLOURS}", "markersize": 4}
            if index >= _COLOURS:  # the colours begin anew
                look |= {"fillstyle": "none", "linestyle": "--"}
            axis.plot(line.retention, 1 - line.value, label=name, **look)
        for style, (model, values) in zip(("-", "--", "-.", ":"), TABLE_4.items(), strict=True):
            missed = [1 - value / 100 for value in values]
            axis.plot(TABLE_4_RETENTIONS, missed, color="0.6", linestyle=style, zorder=0, label=f"paper: {model}")
        axis.set(yscale="log", xlabel="retention", ylabel="share of the exact top-k missed")
        axis.set_title(
            "each row its own top-k" if granularity == "row" else f"{recalls.sampled.iloc[0]} rows share a budget", fontsize=9
        )
        axis.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:.1%}"))
    axes[3].legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="center", frameon=False)
    axes[3].axis("off")
    _heads(axes[2], rows)
    first = rows.iloc[0]
    drawn.suptitle(title(first), fontsize=9)
    return drawn


def title(row: pd.Series) -> str:
    """Model, text and which rows were ranked; rows from before that was a column say only the first two."""
    windows = f"{row.model} on {row.data}, {row.context_tokens}-token windows"
    sampled = f", {row.sampled} of {row.chunk} rows of each chunk, n = {row.n} rows a head" if "sampled" in row else ""
    return f"{windows}{sampled} · {row.measured}"


def _heads(axis, rows: pd.DataFrame) -> None:
    name = rows.method.iloc[0]
    recalls = rows[(rows.metric == "head_recall") & (rows.method == name) & (rows.granularity == "row")]
    least = recalls.retention.min()
    cells = recalls[recalls.retention == least].pivot(index="layer", columns="head", values="value")
    image = axis.imshow(cells, aspect="auto", cmap="viridis", vmax=1)
    axis.set(xlabel="head", ylabel="layer")
    for of in (axis.xaxis, axis.yaxis):
        of.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=15, integer=True))
    axis.set_title(f"recall by head at {least:.0%}: {name}", fontsize=9)
    axis.figure.colorbar(image, ax=axis)
