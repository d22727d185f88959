"""How the loss falls with the position in a window."""

from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    new_figure,
    subject,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Loss of held-out text at every position of a window, averaged over runs of positions that grow with the position."""
    at = rows[rows.metric.str.startswith("loss_at_")]
    losses = at.value.to_numpy()
    drawn, axes = new_figure(columns=1)
    edges = np.unique(np.geomspace(1, len(losses), 24).astype(int))
    means = [np.mean(losses[low:high]) for low, high in pairwise(edges)]
    axes.plot(np.sqrt(edges[:-1] * edges[1:]), means, marker="o", markersize=3)
    axes.set(xscale="log", xlabel="position in the window (tokens)", ylabel="loss on held-out text (nat)")
    axes.set_title(f"{subject(rows)}, n = {at.n.iloc[0]} windows", fontsize=8)
    return drawn
