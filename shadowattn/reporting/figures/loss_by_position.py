"""How the loss falls with the position in a window."""

from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    new_figure,
    subject,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Loss of held-out text at every position of a window, averaged over runs of positions that grow with the position.

    Beside it every figure of the rows that has a 95 % interval.
    """
    at = rows[rows.metric.str.startswith("loss_at_")]
    losses = at.value.to_numpy()
    with_interval = [name for name in rows.metric if f"{name}_low" in set(rows.metric)]
    drawn, panels = new_figure(columns=1 + bool(with_interval))
    axes = np.atleast_1d(panels)[0]
    if with_interval:
        _intervals(panels[1], rows.drop_duplicates("metric").set_index("metric"), with_interval)
    edges = np.unique(np.geomspace(1, len(losses), 24).astype(int))
    means = [np.mean(losses[low:high]) for low, high in pairwise(edges)]
    axes.plot(np.sqrt(edges[:-1] * edges[1:]), means, marker="o", markersize=3)
    axes.set(xscale="log", xlabel="position in the window (tokens)", ylabel="loss on held-out text (nat)")
    axes.set_title(f"{subject(rows)}, n = {at.n.iloc[0]} windows", fontsize=8)
    return drawn


def _intervals(axis: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    """A line for each name: its value with the ends of its interval, and n."""
    value, low, high = (rows.value[[f"{name}{end}" for name in names]].to_numpy() for end in ("", "_low", "_high"))
    reach = np.maximum(0, [value - low, high - value])
    axis.errorbar(value, range(len(names)), xerr=reach, linestyle="none", marker="o", markersize=4, capsize=3)
    labels = [f"{name.replace('_', ' ')} ({rows.unit[name]})\nn = {rows.n[name]}" for name in names]
    axis.set_yticks(range(len(names)), labels, fontsize=7)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", color="0.9")
    axis.set(xscale="log" if (low > 0).all() else "symlog", xlabel="value with 95 % interval, in the unit of each line")
