"""Lists made a layer early: what they lose beside how much of their time attention hides."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure, subject


def draw(rows: pd.DataFrame) -> Figure:
    """Loss above the method's own lists by the share of the ranking's time that is hidden; seconds of a prefill beside."""
    drawn, axes = new_figure(columns=3)
    cells = rows.set_index(["retention", "first_layer", "metric"]).sort_index()
    for index, at in enumerate(sorted(rows.retention.unique())):
        for first in sorted(rows.first_layer.unique()):
            of, color = cells.loc[at, first], f"C{index}"
            look = {"marker": MARKERS[first % len(MARKERS)], "color": color, "capsize": 2, "linestyle": "none"}
            seconds = of.loc["prefill"]
            spread = [[seconds.value - seconds.low], [seconds.high - seconds.value]]
            label = f"retention {at:g}, " + (f"ahead from layer {first}" if first else "own lists")
            axes.flat[1].errorbar([seconds.value], [of.loc["loss_increase"].value], xerr=spread, label=label, **look)
            if first:
                hidden = of.loc["hidden"]
                across = [[hidden.value - hidden.low], [hidden.high - hidden.value]]
                up = [of.loc["loss_increase_error"].value]
                axes.flat[0].errorbar([hidden.value], [of.loc["loss_increase"].value], xerr=across, yerr=up, **look)
    axes.flat[0].set(
        xlabel="share of the ranking's time that passes beside other work",
        ylabel="loss above own lists (nat)",
        xlim=(-0.02, 1.02),
    )
    axes.flat[1].set(xlabel="seconds of a prefill")
    axes.flat[2].axis("off")
    axes.flat[2].legend(*axes.flat[1].get_legend_handles_labels(), fontsize=8, frameon=False, loc="center left")
    first = rows.iloc[0]
    drawn.suptitle(
        f"{subject(rows)}, lists made by what entered the layer before, {first.context_tokens} tokens · measured", fontsize=9
    )
    return drawn
