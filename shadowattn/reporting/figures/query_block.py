"""Lists shared by blocks of rows: what they cost in quality, and how much faster they are."""

import matplotlib.ticker
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.flags import EQUAL_DENSITY
from shadowattn.reporting.style import MARKERS, attending_to_all, levels, new_figure

# Densities that differ by a smaller share than this are the same number of keys.


def draw(rows: pd.DataFrame) -> Figure:
    """What lists shared by more rows cost and save, a line for each way to score a block; per-row lists begin every line.

    Beside it the measured density: methods compare where it is equal, the grey band.
    """
    panels = {
        "loss_increase": "loss increase over dense, nat",
        "accuracy": "retrieval accuracy",
        "mass_recall": "recall of attention mass",
        "density": "density: share of\nvisible keys attended to",
        "times_faster_than_dense": "times faster than our own dense",
    }
    panels = {metric: label for metric, label in panels.items() if (rows.metric == metric).any()}
    whole = attending_to_all(rows)
    sparse = rows[(rows.method != "dense") & ~rows.method.isin(whole.method)]
    per_row = sparse[sparse.query_block == 1]
    sparse = sparse[sparse.estimator.isin(per_row.estimator)]  # a study may vary the estimator for one comparison
    errors = sparse[sparse.metric == "loss_increase_error"].set_index("method")
    drawn, axes = new_figure(columns=3, rows=2)
    for axis, (metric, label) in zip(axes.flat, panels.items(), strict=False):
        start = per_row[per_row.metric == metric]
        for marker, (score, group) in zip(MARKERS, sparse[sparse.query_block > 1].groupby("block_score"), strict=False):
            line = pd.concat([start, group[group.metric == metric]]).sort_values("query_block")
            error = errors.value.reindex(line.method).to_numpy() if metric == "loss_increase" else None
            axis.errorbar(line.query_block, line.value, yerr=error, marker=marker, markersize=4, label=score, capsize=2)
        dense = rows[(rows.method == "dense") & (rows.metric == metric)]
        if metric == "accuracy" and len(dense):
            axis.axhline(dense.value.iloc[0], color="0.5", linestyle="--", label="dense")
        if metric in ("loss_increase", "accuracy"):
            levels(axis, whole[whole.metric == metric])
        if metric == "density" and len(start):
            low, high = start.value.iloc[0] * (1 - EQUAL_DENSITY), start.value.iloc[0] * (1 + EQUAL_DENSITY)
            axis.axhspan(low, high, color="0.85", label=f"per row ± {EQUAL_DENSITY:.0%}")
            axis.legend(fontsize=7)
        axis.set(xlabel="query rows that share a list", ylabel=label, xscale="log")
        if metric == "loss_increase" and (sparse[sparse.metric == metric].value > 0).all():
            axis.set_yscale("log")
        axis.set_xticks(sorted(sparse.query_block.unique()), [str(b) for b in sorted(sparse.query_block.unique())])
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    upper = dict(zip(*axes[0, 0].get_legend_handles_labels()[::-1], strict=True))
    upper |= dict(zip(*axes[0, 1].get_legend_handles_labels()[::-1], strict=True))  # that of dense attention too
    axes[1, 2].legend(upper.values(), upper, fontsize=8, loc="center", frameon=False)
    first, windows = sparse.iloc[0], errors.n.iloc[0]
    timed = "; times on random tensors" if (rows.metric == "times_faster_than_dense").any() else ""
    drawn.suptitle(
        f"{first.model} on {first.data}, retention {first.retention:g}, n = {windows} windows (loss ± standard error) · "
        f"measured, kernel {first.kernel}{timed}",
        fontsize=9,
    )
    return drawn
