"""Which rows of a window lose: the loss increase by how many keys a row sees, by method and retention."""

import math

import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure, subject

METRIC = "octave_loss_increase"


def draw(rows: pd.DataFrame) -> Figure:
    """A panel a retention, a line a method, a point an octave of visible keys; bars are one standard error over windows."""
    found = rows[rows.metric.isin((METRIC, f"{METRIC}_error"))]
    retentions = sorted(found.retention.unique())
    columns = min(3, len(retentions))
    figure, axes = new_figure(columns=columns, rows=math.ceil(len(retentions) / columns))
    panels = np.ravel(axes)
    for axis, retention in zip(panels, retentions, strict=False):
        panel = found[found.retention == retention]
        table = panel.pivot_table(index=["method", "octave"], columns="metric", values="value", sort=False)
        for index, method in enumerate(table.index.unique("method")):
            line = table.xs(method, level="method").sort_index()
            look = {"marker": MARKERS[index % len(MARKERS)], "markersize": 4, "linewidth": 1.2, "capsize": 2}
            axis.errorbar(line.index, line[METRIC], yerr=line.get(f"{METRIC}_error"), label=method, **look)
        octaves = sorted(table.index.unique("octave"))
        axis.axhline(0, color="0.7", linewidth=0.8, zorder=0)
        axis.set(xlabel="keys that a row sees, from", xscale="log", ylabel="loss increase over dense (nat)")
        axis.set_title(f"{retention:.3g} of the keys" if retention < 1 else "every key")
        axis.set_xticks(octaves, [f"{octave:g}" for octave in octaves], fontsize=7)
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.legend(fontsize=7)
    for unused in panels[len(retentions) :]:
        unused.axis("off")
    windows = int(found.n.max())
    figure.suptitle(f"where in a window loss rises: {subject(found)}, n = {windows} windows, ± one standard error", fontsize=9)
    return figure
