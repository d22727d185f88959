"""How much faster than dense attention the sparse path is on a model's own activations, by the number of keys."""

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure, subject


def draw(rows: pd.DataFrame) -> Figure:
    """A row of panels a dtype, a panel a way to make lists, a line a retention; bands: the layers, from slowest to fastest."""
    ratios = rows[rows.metric == "times_faster_than_own_dense"]
    layers = rows[rows.metric == "layer_times_faster_than_own_dense"]
    dtypes, methods = list(ratios.dtype.unique()), list(ratios.method[ratios.method != "sdpa"].unique())
    lengths = sorted(ratios.context_tokens.unique())
    drawn, axes = new_figure(columns=len(methods), rows=len(dtypes))
    panels = np.reshape(axes, (len(dtypes), len(methods)))
    for dtype, line in zip(dtypes, panels, strict=True):
        for method, axis in zip(methods, line, strict=True):
            here = ratios[(ratios.dtype == dtype) & (ratios.method == method)]
            retentions = sorted(here.retention.unique())
            for index, retention in enumerate(retentions):
                colour = colormaps["viridis"](0.85 * index / max(1, len(retentions) - 1))
                cell = here[here.retention == retention].sort_values("context_tokens")
                spread = [(cell.value - cell.low).clip(lower=0), (cell.high - cell.value).clip(lower=0)]  # of few rounds
                look = {"marker": MARKERS[index % len(MARKERS)], "markersize": 4, "color": colour, "capsize": 2}
                axis.errorbar(cell.context_tokens, cell.value, yerr=spread, label=f"{retention:.0%} of the keys", **look)
                of = layers[(layers.dtype == dtype) & (layers.method == method) & (layers.retention == retention)]
                reach = of.groupby("context_tokens").value.agg(["min", "max"])
                axis.fill_between(reach.index, reach["min"], reach["max"], color=colour, alpha=0.15)
            dense = ratios[(ratios.dtype == dtype) & (ratios.method == "sdpa")].sort_values("context_tokens")
            axis.plot(dense.context_tokens, dense.value, color="0.4", linestyle=":", label="SDPA")
            axis.axhline(1, color="0.6", linewidth=1)
            axis.set_xscale("log")
            axis.set_xticks(lengths, [str(keys) for keys in lengths])
            axis.minorticks_off()
            axis.set(xlabel="keys", ylabel="times faster than our dense attention")
            axis.set_title(f"{dtype}, {ways(method)}", fontsize=9)
    panels[0][0].legend(fontsize=7)
    first = ratios.iloc[0]
    drawn.suptitle(
        f"{subject(rows)}, {first.chunk_rows} rows; bands: from the slowest to the fastest layer\n"
        f"measured, medians and quartiles of {first.n} rounds, {first.kernel}",
        fontsize=9,
    )
    return drawn


def ways(method: str) -> str:
    """How a method of the study makes lists, in words."""
    each = {"per_row": "a list for each row", "hierarchical": "for each row, after a first look"}
    return each.get(method) or f"a list for {method.removeprefix('shared_')} rows"
