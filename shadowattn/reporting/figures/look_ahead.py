"""What an estimate loses that is made some layers early, layer by layer."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import new_figure, subject

_TITLES = {"recall": "share of the exact top-k that is chosen", "mass": "share of the exact top-k's attention that is kept"}


def draw(rows: pd.DataFrame) -> Figure:
    """Recall and mass by layer, mean over heads and the range of heads, a line for each distance, at the smallest retention."""
    at = rows.retention.min()
    drawn, axes = new_figure(columns=2)
    for axis, (metric, title) in zip(axes.flat, _TITLES.items(), strict=True):
        for index, (ahead, cell) in enumerate(rows[(rows.metric == metric) & (rows.retention == at)].groupby("ahead")):
            by_layer = cell.groupby("layer").value
            axis.plot(by_layer.mean(), color=f"C{index}", label=f"{ahead} ahead")
            axis.fill_between(by_layer.min().index, by_layer.min(), by_layer.max(), color=f"C{index}", alpha=0.15)
        axis.set(xlabel="layer", ylim=(0, 1.02))
        axis.set_title(title, fontsize=9)
    axes.flat[0].set_ylabel("mean over heads, band: all heads")
    axes.flat[0].legend(fontsize=8, loc="lower right")
    first = rows.iloc[0]
    drawn.suptitle(
        f"{subject(rows)}, estimates made layers early, retention {at:g}, {first.context_tokens} tokens, n = {first.n} rows · "
        "measured",
        fontsize=9,
    )
    return drawn
