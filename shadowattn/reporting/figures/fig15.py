"""Fig. 15 of the paper, simulated: latency by kind of core."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    MARKERS,
    new_figure,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Fig. 15: latency by kind of core, ours against dense attention on it."""
    drawn, axes = new_figure(columns=2, rows=2)
    for axis, (model, model_rows) in zip(axes.flat, rows.groupby("model", sort=False), strict=True):
        cores = list(model_rows.core.unique())
        for index, (method, line) in enumerate(model_rows.groupby("method", sort=False)):
            values = line.set_index("core").value
            axis.plot(cores, [values[core] for core in cores], MARKERS[index] + "-", markersize=6, label=method)
        axis.set(yscale="log", ylabel="ms", xlabel="core")
        axis.set_title(model, fontsize=9)
    axes.flat[0].legend(fontsize=8)
    title = f"SIMULATED, {rows.device.iloc[0]}, {rows.context_tokens.iloc[0]} tokens, one layer, n = {len(rows)}, one description"
    caveat = "the middle core's speed fitted to Fig. 10's mean, the others' assumed; nothing published to hold it to"
    drawn.suptitle(f"{title}\n{caveat}", fontsize=9)
    return drawn
