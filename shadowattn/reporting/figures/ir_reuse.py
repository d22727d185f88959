"""What each way to make graphs of a decoder costs, by the number of layers."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure

_PANELS = (
    ("decode", "compile_s", "seconds to compile, decoding", 1.0),
    ("decode", "held_bytes", "GB held, decoding", 1e-9),
    ("decode", "step_times_whole", "a decoding step, times the whole graph's", 1.0),
    ("prefill", "step_times_whole", "a prefill chunk, times the whole graph's", 1.0),
)


def draw(rows: pd.DataFrame) -> Figure:
    """A line a form, a point a number of layers; quartiles as bars where there are several calls."""
    drawn, axes = new_figure(columns=4)
    for axis, (phase, metric, words, scale) in zip(axes.flat, _PANELS, strict=True):
        part = rows[(rows.phase == phase) & (rows.metric == metric)]
        for index, (form, cell) in enumerate(part.groupby("method", sort=False)):
            cell = cell.sort_values("layers")
            value, spread = scale * cell.value, [scale * (cell.value - cell.low), scale * (cell.high - cell.value)]
            marker = MARKERS[index % len(MARKERS)]
            axis.errorbar(cell.layers, value, yerr=spread, label=form, marker=marker, capsize=2, markersize=5, linewidth=1)
        axis.set(xlabel="layers", ylabel=words, xticks=sorted(rows.layers.unique()))
        axis.set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=7)
    one = rows[rows.metric == "step_s"].iloc[0]
    chunk = rows[rows.phase == "prefill"].chunk_rows.max()
    drawn.suptitle(
        f"{one.model}, float32, {chunk} rows a chunk, {one.context_tokens} earlier tokens, OpenVINO's CPU device, {one.threads} "
        f"threads, medians of {one.n} steps · measured",
        fontsize=9,
    )
    return drawn
