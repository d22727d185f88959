"""How much of a list another layer or a later row could reuse."""

import matplotlib.colors
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowattn.reporting.style import new_figure, subject

_MAPS = {
    "layer_overlap": "of a layer's list, share in the source's",
    "layer_mass": "of a layer's attention mass, share on the source's list",
}


def draw(rows: pd.DataFrame) -> Figure:
    """Layer by source layer, the list and the attention mass; a row's list by how many rows before its source is; row by row."""
    between = rows[rows.metric == "row_overlap"]
    drawn, axes = new_figure(columns=3) if between.empty else new_figure(columns=2, rows=2)
    axes, retention = axes.flat, rows.retention.iloc[0]
    for axis, (metric, title) in zip(axes, _MAPS.items(), strict=False):
        values = rows[rows.metric == metric].pivot_table(index="layer", columns="source_layer", values="value")
        norm = matplotlib.colors.Normalize(retention if metric == "layer_overlap" else 0, 1)
        image = axis.imshow(values.to_numpy(), cmap="viridis", norm=norm)
        drawn.colorbar(image, ax=axis)
        axis.set(xlabel="source layer", ylabel="layer")
        axis.set_title(title, fontsize=9)
    _rows(axes[2], rows[rows.metric == "row_reuse"], retention)
    if not between.empty:
        values = between.pivot_table(index="position", columns="source_position", values="value")
        last = int(values.index.max())
        image = axes[3].imshow(
            values.to_numpy(), cmap="viridis", norm=matplotlib.colors.Normalize(retention, 1), extent=(0, last, last, 0)
        )
        drawn.colorbar(image, ax=axes[3])
        axes[3].set(xlabel="source row", ylabel="row")
        axes[3].set_title("of a row's list, share in the source's\n(or after it); mean over heads", fontsize=9)
    first, pairs = rows.iloc[0], rows[rows.metric == "layer_overlap"].n.iloc[0]
    drawn.suptitle(
        f"{subject(rows)}, exact top {retention:.0%} of {first.context_tokens} tokens, n = {pairs} rows for a pair of layers · "
        "measured",
        fontsize=9,
    )
    return drawn


def _rows(axis: Axes, rows: pd.DataFrame, retention: float) -> None:
    by_distance = rows.groupby("distance").value
    axis.plot(by_distance.mean(), label="mean over layers")
    axis.fill_between(by_distance.min().index, by_distance.min(), by_distance.max(), alpha=0.2, label="range of layers")
    axis.axhline(retention, color="0.6", linestyle=":", label="lists chosen independently")
    axis.set(xscale="log", ylim=(0, 1), xlabel="rows between a row and the source of its list", ylabel="share of a row's list")
    axis.set_title("a head's list, reused by a later row", fontsize=9)
    axis.legend(fontsize=7)
