"""Fig. 7 of the paper: how INT8 scales are distributed."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    new_figure,
    subject,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Fig. 7: cumulative distribution of the INT8 scales of Q and of K, a line for each head of each layer."""
    drawn, axes = new_figure(columns=2)
    for axis, metric, name in zip(axes, ("q_scale", "k_scale"), "QK", strict=True):
        scales = rows[rows.metric == metric]
        observed, layers = scales[scales.method == "observed"], max(1, scales.layer.max())
        for (layer, _), one in observed.groupby(["layer", "head"]):
            values = np.sort(one.value)
            shares = np.arange(1, len(values) + 1) / len(values)
            axis.step(values, shares, color=matplotlib.colormaps["viridis"](layer / layers), linewidth=0.7)
        for scale in scales[scales.method == "grid"].value:
            axis.axvline(scale, color="0.5", linestyle=":")
        axis.set(xscale="log", xlabel=f"INT8 scale of {name} (dotted: buckets)", ylabel="share of chunks")
    axes[0].set_title("a line for each head, dark: first layer", fontsize=8)
    each = len(observed) // len(observed.groupby(["layer", "head"]))
    drawn.suptitle(f"{subject(rows)}, n = {each} chunks a head", fontsize=9)
    return drawn
