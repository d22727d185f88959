"""What was simulated, in pictures: against what was measured or published where that is known."""

from pathlib import Path

import pandas as pd

from shadowattn.reporting.figures import figure

_MARKERS = "osDv^<>P*X"


def validation(rows: pd.DataFrame, path: Path) -> Path:
    """Simulated against measured makespan, by the measured profile and by the fitted device; the band is 10 %."""
    makespans = rows[rows.metric == "makespan"]
    measured = makespans[makespans.measured == "measured"].set_index(["case", "mode"]).value / 1e3
    with figure(path, columns=2, rows=1) as axes:
        for axis, by in zip(axes.flat, ("profile", "device"), strict=True):
            simulated = makespans[makespans.by == by].set_index(["case", "mode"]).value / 1e3
            for index, mode in enumerate(simulated.index.unique("mode")):
                x, y = (of.xs(mode, level="mode").sort_index() for of in (measured, simulated))
                axis.plot(x, y, linestyle="none", marker=_MARKERS[index], markersize=5, label=mode)
            ends = [0.9 * measured.min(), 1.1 * measured.max()]
            axis.plot(ends, ends, color="0.6", linewidth=1)
            axis.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="0.9", zorder=0)
            axis.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="simulated ms")
            axis.set_title("by the measured latency profile" if by == "profile" else "by the device fitted to it", fontsize=9)
        axes.flat[0].legend(fontsize=8)
        axes.flat[0].figure.suptitle(f"one layer's chunk through the pipeline: {rows.model.iloc[0]}, band of 10 %", fontsize=9)
    return path
