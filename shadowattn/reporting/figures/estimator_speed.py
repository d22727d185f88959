"""How much faster than dense attention a chunk is with each estimator, by the number of keys."""

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure, subject


def draw(rows: pd.DataFrame) -> Figure:
    """Times faster than dense, a panel a retention, a line an estimator, a point a length; right of 1 is faster."""
    ratios = rows[rows.metric == "times_faster_than_dense"]
    retentions, lengths = sorted(ratios.retention.unique()), sorted(ratios.context_tokens.unique())
    longest = ratios[(ratios.retention == retentions[0]) & (ratios.context_tokens == lengths[-1])]
    order = longest.sort_values("value").method.tolist()
    drawn, axes = new_figure(columns=len(retentions))
    drawn.set_size_inches(4.8 * len(retentions), 1.2 + 0.25 * len(order))
    axes = np.atleast_1d(axes)
    for axis, retention in zip(axes, retentions, strict=True):
        for index, keys in enumerate(lengths):
            cell = ratios[(ratios.retention == retention) & (ratios.context_tokens == keys)].set_index("method").loc[order]
            colour = colormaps["viridis"](0.9 * index / max(1, len(lengths) - 1))
            spread = [cell.value - cell.low, cell.high - cell.value]
            look = {"linestyle": "none", "marker": MARKERS[index % len(MARKERS)], "color": colour}
            axis.errorbar(cell.value, range(len(order)), xerr=spread, label=f"{keys} keys", **look)
        axis.axvline(1, color="grey", linewidth=1)
        axis.set_xscale("log")
        axis.set_yticks(range(len(order)), order, fontsize=8)
        axis.set(xlabel="times faster than our dense attention")
        axis.set_title(f"retention {retention:g}", fontsize=9)
    axes[0].legend(fontsize=7, loc="lower right")
    first = ratios.iloc[0]
    drawn.suptitle(
        f"{subject(rows)}, {first.chunk_rows} rows · measured, medians and quartiles of {first.n} rounds",
        fontsize=9,
    )
    return drawn
