"""Allocators side by side."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, attending_to_all, levels, new_figure
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
    comparisons = gains(rows)
    comparisons = comparisons[comparisons.rival == "uniform"]
    count = len(panels) + bool(len(comparisons))
    drawn, axes = new_figure(columns=min(2, count), rows=-(-count // 2))
    axes = np.atleast_1d(axes).flat
    looks = {
        method: {"color": f"C{index}", "marker": MARKERS[index % len(MARKERS)], "markersize": 4}
        for index, method in enumerate(sparse.method.unique())
    }
    errors = sparse[sparse.metric == "loss_increase_error"].set_index(["method", "retention"]).value
    for axis, (metric, label) in zip(axes, panels.items(), strict=False):
        panel_rows = sparse[(sparse.metric == metric) & ((sparse.estimator == estimator) | (metric == "accuracy"))]
        if metric == "accuracy":
            _lines_together(axis, panel_rows, looks)
            axis.set_ylim(-0.05, 1.05)
        else:
            _lines(axis, panel_rows, looks, errors if metric == "loss_increase" else None)
        dense = rows[(rows.metric == metric) & (rows.method == "dense")]
        if len(dense):
            axis.axhline(dense.value.iloc[0], color="0.5", linestyle="--", label="dense")
        levels(axis, whole[whole.metric == metric])
        axis.set(xlabel="mean retention", ylabel=label)
        axis.set_xticks(sorted(sparse.retention.unique()))
    positive = rows[rows.metric == "loss_increase"].value.min() > 0
    drawn.axes[0].set_yscale("log") if positive else drawn.axes[0].set_yscale("symlog", linthresh=0.001)
    if len(comparisons):
        _gains(drawn.axes[count - 1], comparisons, looks)
    for axis in drawn.axes[count:]:
        axis.axis("off")
    handles = {label: handle for axis in drawn.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), fontsize=7, loc="outside lower center", ncols=5)
    row, windows = sparse.iloc[0], rows[rows.metric == "loss_increase_error"].n
    n = f"n = {windows.iloc[0]} " if len(windows) else ""
    drawn.suptitle(
        f"{row.model} on {row.data}, {n}windows of {row.context_tokens} tokens, loss ± one standard error\n{row.measured}, "
        f"estimator {row.estimator}, kernel {row.kernel}",
        fontsize=9,
    )
    return drawn


def _lines(axis, rows: pd.DataFrame, looks: dict[str, dict], errors: pd.Series | None) -> None:
    for method, group in rows.groupby("method", sort=False):
        group = group.sort_values("retention")
        reach = None if errors is None else [errors.get((method, at), np.nan) for at in group.retention]
        axis.errorbar(group.retention, group.value, yerr=reach, capsize=2, label=method, **looks[method])


def _lines_together(axis, rows: pd.DataFrame, looks: dict[str, dict]) -> None:
    """A line for all methods that have the same values everywhere: one would hide the others."""
    together: dict[tuple, list[str]] = {}
    for method, group in rows.groupby("method", sort=False):
        group = group.sort_values("retention")
        together.setdefault((tuple(group.retention), tuple(group.value)), []).append(str(method))
    for (retentions, values), methods in together.items():
        look = looks[methods[0]] if len(methods) == 1 else {"color": "0.2", "marker": "o", "markersize": 4}
        axis.plot(retentions, values, label=methods[0] if len(methods) == 1 else f"{len(methods)} methods alike", **look)


def _gains(axis, comparisons: pd.DataFrame, looks: dict[str, dict]) -> None:
    """Gains with 95 % intervals side by side, a group for each retention; filled where the difference is significant."""
    methods, retentions = list(comparisons.method.unique()), sorted(comparisons.retention.unique())
    for index, method in enumerate(methods):
        method_rows = comparisons[comparisons.method == method].sort_values("retention")
        x = np.array([retentions.index(at) for at in method_rows.retention]) + 0.8 * (index + 0.5) / len(methods) - 0.4
        shown = method_rows.verdict.isin(("better", "worse")).to_numpy()
        for kept, fill in ((shown, "full"), (~shown, "none")):
            part = method_rows[kept]
            reach = [part.gain - part.low, part.high - part.gain]
            axis.errorbar(x[kept], part.gain, yerr=reach, linestyle="none", fillstyle=fill, **looks[method])
    axis.axhline(0, color="0.5", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=0.01)
    axis.set_xticks(range(len(retentions)), [f"{at:g}" for at in retentions])
    axis.set(xlabel="mean retention", ylabel="loss saved against\nuniform (nat, 95 %)")
    ends = comparisons[["gain", "low", "high"]].to_numpy()  # a single window has no interval
    axis.set_ylim(2 * min(np.nanmin(ends), -0.01), 2 * max(np.nanmax(ends), 0.01))  # no marker is cut at the edge
    axis.set_title(f"n = {comparisons.n.iloc[0]} windows; filled: Holm-corrected p ≤ 0.05", fontsize=8)
