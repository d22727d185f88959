"""Allocators side by side."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    attending_to_all,
    levels,
    lines,
    new_figure,
)
from shadowattn.reporting.verdicts import gains


def draw(rows: pd.DataFrame) -> Figure:
    """Loss increase, retrieval and recall of attention mass against retention, a line for each allocator; and what each gains
    over uniform budgets. Methods of another estimator stand beside the others in retrieval alone."""
    whole = attending_to_all(rows)
    sparse = rows[(rows.method != "dense") & ~rows.method.isin(whole.method)]
    estimator = sparse.estimator.iloc[0]
    panels = {"loss_increase": "loss increase over dense (nat)", "accuracy": "retrieval, exact match"}
    panels = {name: label for name, label in panels.items() if name in set(rows.metric)}
    panels["mass_recall"] = "recall of attention mass"
    found = gains(rows)
    found = found[found.rival == "uniform"]
    drawn, axes = new_figure(columns=len(panels) + bool(len(found)))
    axes = np.atleast_1d(axes)
    errors = sparse[sparse.metric == "loss_increase_error"].set_index(["method", "retention"]).value
    for axis, (metric, label) in zip(axes, panels.items(), strict=False):
        of = sparse[(sparse.metric == metric) & ((sparse.estimator == estimator) | (metric == "accuracy"))]
        if metric == "accuracy":
            _lines_together(axis, of)
            axis.set_ylim(-0.05, 1.05)
        elif metric == "loss_increase":
            lines(axis, of, errors)
        else:
            lines(axis, of)
        dense = rows[(rows.metric == metric) & (rows.method == "dense")]
        if len(dense):
            axis.axhline(dense.value.iloc[0], color="0.5", linestyle="--", label="dense")
        levels(axis, whole[whole.metric == metric])
        axis.set(xlabel="mean retention", ylabel=label)
        axis.set_xticks(sorted(sparse.retention.unique()))
        axis.legend(fontsize=7)
    positive = rows[rows.metric == "loss_increase"].value.min() > 0
    axes[0].set_yscale("log") if positive else axes[0].set_yscale("symlog", linthresh=0.001)
    if len(found):
        _gains(axes[-1], found)
    row = sparse.iloc[0]
    drawn.suptitle(
        f"{row.model} on {row.data}, windows of {row.context_tokens} tokens, loss ± one standard error · {row.measured}, "
        f"estimator {row.estimator}, kernel {row.kernel}",
        fontsize=9,
    )
    return drawn


def _lines_together(axis, rows: pd.DataFrame) -> None:
    """A line for all methods that have the same values everywhere: one would hide the others."""
    together: dict[tuple, list[str]] = {}
    for method, group in rows.groupby("method", sort=False):
        group = group.sort_values("retention")
        together.setdefault((tuple(group.retention), tuple(group.value)), []).append(str(method))
    for (retentions, values), methods in together.items():
        label = methods[0] if len(methods) == 1 else f"{len(methods)} methods alike"
        axis.plot(retentions, values, marker="o", markersize=4, label=label)


def _gains(axis, found: pd.DataFrame) -> None:
    """Gains with 95 % intervals side by side, a group for each retention; filled where the difference is shown."""
    methods, retentions = list(found.method.unique()), sorted(found.retention.unique())
    for index, method in enumerate(methods):
        of = found[found.method == method].sort_values("retention")
        x = np.array([retentions.index(at) for at in of.retention]) + 0.8 * (index + 0.5) / len(methods) - 0.4
        shown = of.verdict.isin(("better", "worse")).to_numpy()
        for kept, fill, label in ((shown, "full", method), (~shown, "none", None)):
            part = of[kept]
            reach = [part.gain - part.low, part.high - part.gain]
            axis.errorbar(
                x[kept], part.gain, yerr=reach, linestyle="none", marker="o", markersize=4, fillstyle=fill, color=f"C{index}",
                label=label,
            )  # fmt: skip
    axis.axhline(0, color="0.5", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=0.01)
    axis.set_xticks(range(len(retentions)), [f"{at:g}" for at in retentions])
    axis.set(xlabel="mean retention", ylabel="loss saved against uniform (nat, 95 %)")
    axis.set_title(f"n = {found.n.iloc[0]} windows; filled: Holm-corrected p ≤ 0.05", fontsize=8)
    axis.legend(fontsize=7)
