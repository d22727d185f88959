"""Which heads static INT8 attention breaks: errors beside sinks and outliers, and what remedies leave."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    new_figure,
    subject,
)

_AGAINST = {
    "sink_share": "share of the probability on the first key",
    "small_share": "share of the probability that steps of 1/127 round to zero",
}


def draw(rows: pd.DataFrame) -> Figure:
    """Left and middle: each head's output error against its sink and its small probabilities; right: all heads, by candidate."""
    placed, whole = rows[rows.layer >= 0], rows[(rows.layer < 0) & (rows.metric == "output_error")]
    errors = placed[placed.metric == "output_error"].set_index(["method", "layer", "head"]).value
    drawn, axes = new_figure(columns=3)
    for axis, (metric, label) in zip(axes, _AGAINST.items(), strict=False):
        sizes = placed[placed.metric == metric].set_index(["layer", "head"]).value
        for marker, method in zip("os", ("npu_full", "qkv"), strict=True):
            axis.plot(sizes, errors[method].reindex(sizes.index), marker, markersize=3, fillstyle="none", alpha=0.7, label=method)
        axis.set(xlabel=label, ylabel="relative output error of a head", yscale="log")
        axis.legend(fontsize=7)
    names = [*whole.method]
    axes[2].barh(range(len(names)), whole.value, 0.7, color="C0")
    axes[2].set_yticks(range(len(names)), names, fontsize=6)
    axes[2].invert_yaxis()
    axes[2].set(xlabel="relative output error, all heads")
    first = rows.iloc[0]
    drawn.suptitle(
        f"{subject(rows)}, n = {first.n} rows in windows of {first.context_tokens} tokens · attention in static INT8, "
        f"{first.measured}",
        fontsize=9,
    )
    return drawn
