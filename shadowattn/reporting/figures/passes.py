"""What surgery on a decoder's graph buys, by the size of the vocabulary."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure

_PANELS = {
    "first_token": ("seconds to the first token", 1.0),
    "next_token": ("milliseconds to the next token", 1e3),
    "peak_bytes": ("MiB beyond the compiled graph", 2**-20),
}


def draw(rows: pd.DataFrame) -> Figure:
    """First token, next token and memory of every form of the graph; quartiles as bars."""
    drawn, axes = new_figure(columns=3)
    for axis, (metric, (words, scale)) in zip(axes.flat, _PANELS.items(), strict=True):
        for index, (form, cell) in enumerate(rows[rows.metric == metric].groupby("method", sort=False)):
            cell = cell.sort_values("vocabulary")
            value, spread = scale * cell.value, [scale * (cell.value - cell.low), scale * (cell.high - cell.value)]
            axis.errorbar(cell.vocabulary / 1000, value, yerr=spread, label=form, marker=MARKERS[index], capsize=2, markersize=5)
        axis.set(xlabel="thousand tokens of the vocabulary", ylabel=words)
        axis.set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=8)
    one = rows[rows.metric == "first_token"].iloc[0]
    drawn.suptitle(
        f"{one.model}, prompt of {one.context_tokens} tokens, {one.threads} threads, medians of {one.n} calls · measured",
        fontsize=9,
    )
    return drawn
