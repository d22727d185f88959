"""How much slower each way to attend becomes beside other programs."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure


def draw(rows: pd.DataFrame) -> Figure:
    """Times the time of the quiet machine, a panel for each dtype and way to wait, a line a way to attend."""
    rows = rows[rows.metric == "slowdown"]
    panels = list(rows.groupby(["model", "dtype", "waiting"], sort=False))
    drawn, axes = new_figure(columns=len(panels))
    axes = np.atleast_1d(axes)
    for axis, ((model, dtype, waiting), some) in zip(axes, panels, strict=True):
        loads = [load for load in dict.fromkeys(some.load) if (some[some.load == load].value != 1).any()]
        for index, (method, line) in enumerate(some.groupby("method", sort=False)):
            line = line.set_index("load").loc[loads]
            spread = [line.value - line.low, line.high - line.value]
            places = [place + 0.08 * (index - 2) for place in range(len(loads))]
            axis.errorbar(places, line.value, yerr=spread, label=method, marker=MARKERS[index], capsize=2, linestyle="none")
        axis.axhline(1, color="grey", linewidth=1)
        axis.set_xticks(range(len(loads)), loads, fontsize=8)
        axis.set(xlabel="beside", ylim=(0, 1.05 * rows.high.max()))
        axis.set_title(f"{model}, {dtype}, threads {waiting}", fontsize=9)
    axes[0].set_ylabel("times the time of the quiet machine")
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    first = rows.iloc[0]
    drawn.suptitle(
        f"{first.chunk_rows} rows of {first.context_tokens} keys, retention {first.retention:g} · measured, medians and "
        f"quartiles of {first.n} rounds",
        fontsize=9,
    )
    return drawn
