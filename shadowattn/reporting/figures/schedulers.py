"""Schedulers: how far from the optimum, and how long they plan."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    MARKERS,
    new_figure,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Median gap to the optimum (to its bound where it is not proven) against heads, by costs and machines; and planning time."""
    drawn, axes = new_figure(columns=2, rows=3)
    for line, costs in enumerate(("measured", "random")):
        for column, machines in enumerate((3, 2)):
            axis = axes[line, column]
            gaps = rows[(rows.metric == "gap_median") & (rows.costs == costs) & (rows.machines == machines)]
            for index, (name, part) in enumerate(gaps[gaps.method != "optimal"].groupby("method", sort=False)):
                axis.plot(part.heads, 100 * part.value, marker=MARKERS[index], markersize=4, linewidth=1, label=name)
            axis.axhline(2, color="0.6", linestyle="--", linewidth=1)
            shared = "three processors" if machines == 3 else "selection and attention share one"
            axis.set_title(f"{costs} costs, {shared}", fontsize=9)
            axis.set(ylabel="median % over the optimum", ylim=(0, None))
    for column, costs in enumerate(("measured", "random")):
        axis = axes[2, column]
        times = rows[(rows.metric == "planning_time") & (rows.costs == costs) & (rows.machines == 3)]
        for index, (name, part) in enumerate(times.groupby("method", sort=False)):
            axis.plot(part.heads, part.value, marker=MARKERS[index], markersize=4, linewidth=1, label=name)
        axis.axhline(1000, color="0.6", linestyle="--", linewidth=1)
        axis.set(yscale="log", xlabel="heads of a layer", ylabel=f"µs to plan, {costs} costs")
    axes[0, 0].legend(fontsize=7)
    drawn.suptitle(
        f"measured costs: latencies of {rows.model.iloc[0]} on this machine; n = {rows.n.max()} works a point; lengths of orders "
        "simulated, planning time measured; dashed: targets",
        fontsize=9,
    )
    return drawn
