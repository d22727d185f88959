"""Importance by racing, against exact importance."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    new_figure,
    subject,
)


def draw(rows: pd.DataFrame) -> Figure:
    """How near races come to the exact profile, against the work that they save: a marker for each order of the windows."""
    panels = {
        "rank_correlation": "rank correlation of heads",
        "retention_largest_difference": "largest difference of a retention",
    }
    drawn, axes = new_figure(columns=2)
    for axis, (metric, label) in zip(axes, panels.items(), strict=True):
        for marker, (method, races) in zip("osD", rows[rows.seed > 0].groupby("method", sort=False), strict=True):
            cells = races.pivot(index="seed", columns="metric", values="value")
            axis.plot(cells.times_fewer_forwards, cells[metric], marker, markersize=4, fillstyle="none", label=method)
        axis.set(xlabel="times fewer forward passes than exact on all windows", ylabel=label)
    axes[0].legend(fontsize=7)
    orders = rows.seed[rows.seed > 0].nunique()
    drawn.suptitle(f"{subject(rows)}, {orders} orders of the windows · measured", fontsize=9)
    return drawn
