"""Quality against retention: loss, divergence and fidelity of every method."""

import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, attending_to_all, levels, new_figure, subject

_QUALITY = {
    "loss_increase": "loss increase over dense (nat)",
    "kl_divergence": "KL divergence from dense (nat)",
    "mass_recall": "recall of attention mass",
    "topk_overlap": "overlap with the exact top-k",
    "output_error": "relative output error",
}


def draw(rows: pd.DataFrame) -> Figure:
    """Loss increase and fidelity of every method: against retention, or where there are one or two, as dots.

    Methods that attend to every key, in other arithmetic, are a level across the panel, or a dot at retention 1.
    """
    whole = attending_to_all(rows)
    sparse = rows[(rows.method != "dense") & (rows.retention < 1)]  # at 1 every method that estimates is dense
    shown = pd.concat([sparse, whole])
    errors = shown[shown.metric.isin(["loss_increase_error", "kl_divergence_error"])]
    errors = errors.set_index(["metric", "method", "retention"]).sort_index()
    few = sparse.retention.nunique() < 3
    panels = [metric for metric in _QUALITY if metric != "kl_divergence" or (rows.metric == metric).any()]
    drawn, axes = new_figure(columns=2 if len(panels) == 4 else 3, rows=2)
    for axis, metric in zip(axes.flat, panels, strict=False):
        panel = (shown if few else sparse)[lambda frame, metric=metric: frame.metric == metric].set_index(["method", "retention"])
        measured = f"{metric}_error" in errors.index.levels[0]
        error = errors.value[f"{metric}_error"].reindex(panel.index) if measured else panel.value * 0
        (_dots if few else _lines_with_errors)(axis, panel.value, error)
        whole_of = whole[whole.metric == metric]
        if not few:
            levels(axis, whole_of)
        axis.set(**{"xlabel" if few else "ylabel": _QUALITY[metric]})
        if metric in ("loss_increase", "kl_divergence"):
            # A bar that ends at 0 or below fits no logarithmic axis.
            positive = (panel.value - error > 0).all() and (whole_of.value > 0).all()
            scale = {"value": "log"} if positive else {"value": "symlog", "linthresh": 0.001}
            (axis.set_xscale if few else axis.set_yscale)(**scale)
        if not few:
            axis.set(xlabel="retention (kept fraction of visible keys)", xscale="log")
            axis.set_xticks(sorted(sparse.retention.unique()))
            axis.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
            axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    handles = axes[0, 0].get_legend_handles_labels()
    if len(panels) % 2:
        axes[1, 2].legend(*handles, fontsize=8, loc="center", frameon=False)
        axes[1, 2].axis("off")
    else:
        drawn.legend(*handles, fontsize=8, loc="outside lower center", ncols=6)
    first = rows.iloc[0]
    devices = ", ".join(sorted(set(rows.estimate_device) - {"none"}))
    estimate = f", INT8 estimate on {devices}" if devices else ""
    of = {metric: int(part.n.iloc[0]) for metric, part in errors.groupby("metric")}
    loss, divergence = of.get("loss_increase_error"), of.get("kl_divergence_error")
    windows = f"n = {loss} windows of {first.context_tokens} tokens" if loss else f"n = {first.n} tokens"
    windows += f", {divergence} for the divergence" if divergence not in (None, loss) else ""
    bars = "loss and divergence" if divergence else "loss"
    drawn.suptitle(
        f"{subject(rows)}, {windows}, {bars} ± one standard error · {first.measured}{estimate}, kernel {first.kernel}",
        fontsize=9,
    )
    return drawn


def _lines_with_errors(axis: Axes, values: pd.Series, errors: pd.Series) -> None:
    """A line for each method, with bars where there are errors."""
    for index, method in enumerate(values.index.unique("method")):
        line = values.xs(method, level="method").sort_index()
        reach = errors.xs(method, level="method").reindex(line.index)
        look = {"marker": MARKERS[index % len(MARKERS)], "markersize": 5, "linewidth": 1.2, "capsize": 2}
        if index % 2:  # hollow and dashed, so that a line on top of another hides nothing
            look |= {"fillstyle": "none", "linestyle": "--", "zorder": 3}
        axis.errorbar(line.index, line, yerr=reach, label=method, **look)


def _dots(axis: Axes, values: pd.Series, errors: pd.Series) -> None:
    """A line of the panel for each method, a marker for each retention."""
    values = values.dropna()
    methods = list(values.index.unique("method"))
    for index, (marker, at) in enumerate(zip(MARKERS, sorted(values.index.unique("retention")), strict=False)):
        dots = values.xs(at, level="retention").reindex(methods)
        places = np.arange(len(methods)) + 0.15 * (index - 0.5)
        reach = errors.xs(at, level="retention").reindex(methods)
        label = f"retention {at:g}" if at < 1 else "every key"  # at 1 only methods that attend to all are drawn
        axis.errorbar(dots, places, xerr=reach, linestyle="none", marker=marker, markersize=5, capsize=2, label=label)
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))  # close values have long labels
    axis.set_yticks(range(len(methods)), methods)
    axis.grid(axis="y", color="0.9")
    axis.set_ylim(max(1, len(methods)) - 0.5, -0.5)  # the first at the top; a panel may be empty
