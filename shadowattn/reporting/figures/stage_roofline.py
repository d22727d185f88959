"""Rates of the engine's stages beside what the machine can do, in a prefill and in a decode."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure, subject

_STAGES = f"{MARKERS}hHd8+x|"
_COLOURS = {"float32": "C0", "bfloat16": "C1", "int8": "C2"}


def draw(rows: pd.DataFrame) -> Figure:
    """Rate against operations a byte, both logarithmic: a panel a phase, a marker a stage, a colour an arithmetic, filled at the
    longest context; larger markers are larger batches."""
    rates = rows[rows.metric == "rate"]
    peaks = rows[rows.method == "machine"].set_index("metric").value
    phases, stages = list(dict.fromkeys(rates.phase)), list(dict.fromkeys(rates.stage))
    drawn, axes = new_figure(columns=len(phases))
    drawn.set_size_inches(5.2 * len(phases) + 2, 4.4)
    for axis, phase in zip(np.atleast_1d(axes), phases, strict=True):
        points = rates[rates.phase == phase]
        x = np.geomspace((points.operations / points.bytes).min() / 2, (points.operations / points.bytes).max() * 2)
        for arithmetic, colour in _COLOURS.items():
            if f"peak {arithmetic}" not in peaks:  # a processor without such products
                continue
            roof = np.minimum(peaks[f"peak {arithmetic}"], x * peaks["bandwidth"])
            axis.plot(x, roof, color=colour, linewidth=1, label=f"roof, {arithmetic}")
        for row in points.itertuples():
            colour = _COLOURS[row.arithmetic]
            filled = colour if row.context_tokens == points.context_tokens.max() else "none"
            size = 20 * (1 + np.log2(row.batch))
            marker = _STAGES[stages.index(row.stage) % len(_STAGES)]
            axis.scatter(row.operations / row.bytes, row.value, s=size, marker=marker, color=colour, facecolor=filled)
        first = points.iloc[0]
        title = f"{phase}, {first.chunk_rows} rows" if phase == "prefill" else f"{phase}, batches of {_said(points.batch)}"
        axis.set_title(f"{title}, {_said(points.context_tokens)} keys", fontsize=9)
        axis.set(
            xscale="log", yscale="log", xlabel="operations for each byte that must be moved", ylabel="10⁹ operations a second"
        )
    for index, stage in enumerate(stages):
        np.atleast_1d(axes)[0].scatter([], [], marker=_STAGES[index % len(_STAGES)], color="0.4", label=stage)
    drawn.legend(*np.atleast_1d(axes)[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    drawn.suptitle(f"{subject(rows)}, one layer · measured, medians of {rates.n.iloc[0]} rounds", fontsize=9)
    return drawn


def _said(values: pd.Series) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values.unique()))
