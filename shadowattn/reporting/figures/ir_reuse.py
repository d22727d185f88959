"""What each way to make graphs of a decoder costs."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure

_PANELS = (
    ("decode", "compile_s", "seconds to compile, decoding", 1.0),
    ("decode", "held_bytes", "GB held, decoding", 1e-9),
    ("decode", "step_times_whole", "decoding step, times the whole graph's", 1.0),
    ("prefill", "step_times_whole", "prefill chunk, times the whole graph's", 1.0),
)


def draw(rows: pd.DataFrame) -> Figure:
    """A line a form, a marker a number of layers; quartiles as bars where there are several calls."""
    forms, counts = list(dict.fromkeys(rows.method)), sorted(rows.layers.unique())
    drawn, axes = new_figure(columns=4)
    for axis, (phase, metric, words, scale) in zip(axes.flat, _PANELS, strict=True):
        part = rows[(rows.phase == phase) & (rows.metric == metric)]
        for index, layers in enumerate(counts):
            cell = part[part.layers == layers].set_index("method").reindex(forms)
            value, spread = scale * cell.value, [scale * (cell.value - cell.low), scale * (cell.high - cell.value)]
            look = {"fmt": MARKERS[index % len(MARKERS)], "capsize": 2, "markersize": 5}
            axis.errorbar(value, np.arange(len(forms)), xerr=spread, label=f"{layers} layers", **look)
        axis.set_yticks(range(len(forms)), forms if axis is axes.flat[0] else [""] * len(forms), fontsize=8)
        axis.invert_yaxis()
        axis.grid(axis="y", linewidth=0.5)
        axis.set_xlabel(words)
        axis.set_xlim(left=0)
    axes.flat[0].legend(fontsize=7)
    one = rows[rows.metric == "step_s"].iloc[0]
    chunk = rows[rows.phase == "prefill"].chunk_rows.min()
    drawn.suptitle(
        f"{one.model}, float32, {chunk} rows a chunk, {one.context_tokens} earlier tokens, OpenVINO's CPU device, {one.threads} "
        f"threads, medians of {one.n} steps · measured",
        fontsize=9,
    )
    return drawn
