"""The simulator held to measured calls."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    MARKERS,
    new_figure,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Simulated against measured calls, a panel for each source of costs; the band is 10 %, hollow points were fitted on.

    Bars: the 95 % interval of the measured times.
    """
    makespans = rows[rows.metric == "makespan"]
    measured = makespans[makespans.measured == "measured"].set_index(["case", "mode"]).value / 1e3
    itself = measured * rows[rows.metric == "uncertainty"].set_index(["case", "mode"]).value
    fitted = sorted(makespans[makespans.flag != ""].case.unique())
    simulated_by = makespans[makespans.measured == "simulated"]
    sources = list(simulated_by.by.unique())
    drawn, axes = new_figure(columns=len(sources), rows=1)
    for axis, by in zip(axes.flat, sources, strict=True):
        simulated = simulated_by[simulated_by.by == by].set_index(["case", "mode"]).value / 1e3
        for index, mode in enumerate(simulated.index.unique("mode")):
            x, y = (times.xs(mode, level="mode").sort_index() for times in (measured, simulated))
            bars = itself.xs(mode, level="mode").sort_index()
            look = {"linestyle": "none", "marker": MARKERS[index], "markersize": 5, "color": f"C{index}", "elinewidth": 0.7}
            axis.errorbar(x[fitted], y[fitted], xerr=bars[fitted], markerfacecolor="none", **look)
            axis.errorbar(x.drop(fitted), y.drop(fitted), xerr=bars.drop(fitted), label=mode, **look)
        shown = measured[measured.index.isin(simulated.index)]
        ends = [0.9 * shown.min(), 1.1 * shown.max()]
        axis.plot(ends, ends, color="0.6", linewidth=1)
        axis.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="0.9", zorder=0)
        axis.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="SIMULATED ms")
        axis.set_title(f"costs from the {by}", fontsize=9)
    axes.flat[0].legend(fontsize=8)
    held_out = makespans.case.nunique() - len(fitted)
    calls = int(makespans[makespans.measured == "measured"].n.max())
    title = f"one layer's chunk: {rows.model.iloc[0]}, {calls} calls each, band of 10 %"
    chunks = f"filled: {held_out} held-out chunks; hollow: {len(fitted)} that contention was fitted on"
    drawn.suptitle(f"{title}\n{chunks}", fontsize=9)
    return drawn
