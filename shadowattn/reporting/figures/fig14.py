"""Fig. 14 of the paper: recall and loss by the number of buckets and by their step σ."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.figures.recall import title
from shadowattn.reporting.style import MARKERS, new_figure
from shadowattn.reporting.verdicts import gains


def draw(rows: pd.DataFrame) -> Figure:
    """Fig. 14: recall, clipping, zeros and loss against the number of buckets and against σ, by raw and by log lookup.

    The loss is that beyond the reference estimate's on the same windows, with 95 % intervals; filled where the difference is
    significant after correction for all comparisons.
    """
    panels = {
        "recall": "share of the exact top 20 % missed",
        "clipped_heads": "heads that a bucket clips",
        "q_zero": "values of Q that become 0",
    }
    losses = gains(rows)
    if len(losses):
        panels["loss"] = f"loss beyond that of “{losses.rival.iloc[0]}”\n(nat, 95 % interval; filled: Holm-corrected p ≤ 0.05)"
    least = rows[rows.metric == "recall"].retention.min()
    dynamic = rows[
        (rows.lookup == "dynamic") & (rows.metric == "recall") & (rows.granularity == "row") & (rows.retention == least)
    ]
    rows = rows[(rows.buckets > 0) & (rows.estimator == "int8")]
    drawn, axes = new_figure(columns=2, rows=len(panels))
    for line, (metric, label) in enumerate(panels.items()):
        panel = rows[rows.metric == metric]
        if metric == "loss":
            estimates = rows[rows.metric == "loss_increase"].set_index("method")[["sigma", "buckets", "lookup"]]
            panel = losses.join(estimates, on="method").assign(value=-losses.gain)
        if metric == "recall":
            panel = panel[(panel.granularity == "row") & (panel.retention == least)].assign(value=1 - panel.value)
        for index, lookup in enumerate(("raw", "log")):
            mark = {"marker": MARKERS[index], "markersize": 5, "label": f"{lookup} lookup", "linewidth": 1}
            counted = panel[(panel.sigma == 0.5) & (panel.lookup == lookup)].sort_values("buckets")
            stepped = panel[(panel.buckets == 9) & (panel.lookup == lookup)].sort_values("sigma")
            aside = (-1, 1)[index]  # side by side, or one would hide the other
            for axis, x, points, style in (
                (axes[line, 0], "buckets", counted.assign(buckets=counted.buckets + 0.25 * aside), "none"),
                (axes[line, 1], "sigma", stepped.assign(sigma=stepped.sigma * 1.03**aside), "-"),
            ):
                if metric == "loss":
                    _differences(axis, x, points, color=f"C{index}", **mark)
                else:
                    axis.plot(points[x], points.value, linestyle=style, **mark)
            if metric == "recall" and lookup == "raw":  # the log lookup's points lie beside these
                for _, point in counted[counted.buckets == 5].iterrows():
                    place = {"xytext": (-6, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
                    axes[line, 0].annotate(point.method.split(",")[0], (5 + 0.25 * aside, point.value), fontsize=7, **place)
        if metric == "recall" and len(dynamic):
            for axis in axes[line]:
                axis.axhline(1 - dynamic.value.iloc[0], color="0.5", linestyle="--", label="dynamic scales")
        for axis in axes[line]:
            axis.set_ylabel(label, fontsize=8)
            if metric == "loss":
                axis.axhline(0, color="0.5", linewidth=0.8)
            else:
                axis.set_ylim(0, 1.2 * axis.get_ylim()[1])
    axes[-1, 0].set_xlabel("buckets, σ = 0.5")
    axes[-1, 1].set_xlabel("σ, 9 buckets")
    for axis in axes[:, 1]:
        axis.set_xscale("log")
        axis.set_xlim(axes[0, 1].get_xlim())
    axes[0, 0].legend(fontsize=7)
    first = rows.iloc[0]
    loss = f"\nn = {losses.n.iloc[0]} windows for the loss" if len(losses) else ""
    drawn.suptitle(title(first) + loss, fontsize=9)
    return drawn


def _differences(axis, x: str, points: pd.DataFrame, **mark) -> None:
    """Points with their 95 % intervals, filled where a difference is shown."""
    shown = points.verdict.isin(("better", "worse"))
    for part, fill in ((points[shown], "full"), (points[~shown], "none")):
        reach = [part.gain - part.low, part.high - part.gain]
        axis.errorbar(part[x], part.value, yerr=reach, linestyle="none", fillstyle=fill, **(mark | {"linewidth": 1}))
