"""Figures of the offline stage: the paper's Fig. 6 and Fig. 7 from our rows, retentions, and allocators side by side."""

import matplotlib
import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.figures import attending_to_all, levels, lines, new_figure, plain_ticks, subject
from shadowattn.reporting.verdicts import gains


def fig6(rows: pd.DataFrame) -> Figure:
    """Fig. 6: perplexity with each head of the first layer ablated (a), with each layer bypassed (b), as distances from the
    perplexity of the whole model."""
    placed = rows[(rows.metric == "perplexity") & (rows.layer >= 0)]
    base = rows[(rows.metric == "perplexity") & (rows.layer < 0)].value.iloc[0]
    heads = placed[(placed.layer == 0) & (placed["head"] >= 0)].sort_values("head")
    layers = placed[placed["head"] < 0].sort_values("layer")
    drawn, axes = new_figure(columns=2)
    ablation = heads.method.iloc[0].removeprefix("ablate_")
    axes[0].vlines(heads["head"], base, heads.value, color="tab:blue", linewidth=1)
    axes[0].plot(heads["head"], heads.value, "o", color="tab:blue", markersize=4)
    axes[0].set(xlabel="head of the first layer", ylabel=f"perplexity without it ({ablation})")
    axes[1].vlines(layers.layer, base, layers.value, color="tab:blue", linewidth=1)
    axes[1].plot(layers.layer, layers.value, "o", color="tab:blue", markersize=4)
    axes[1].set(xlabel="layer", ylabel="perplexity without it", yscale="log")
    for axis in axes:
        axis.axhline(base, color="0.5", linestyle="--", label=f"nothing ablated: {base:.4g}")
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    plain_ticks(axes[1].yaxis)
    axes[0].legend(fontsize=7)
    drawn.suptitle(f"{subject(rows)}, n = {heads.n.iloc[0]} tokens", fontsize=9)
    return drawn


def fig7(rows: pd.DataFrame) -> Figure:
    """Fig. 7: cumulative distribution of the INT8 scales of Q and of K, a line for each head of each layer."""
    drawn, axes = new_figure(columns=2)
    for axis, metric, name in zip(axes, ("q_scale", "k_scale"), "QK", strict=True):
        of = rows[rows.metric == metric]
        observed, layers = of[of.method == "observed"], max(1, of.layer.max())
        for (layer, _), one in observed.groupby(["layer", "head"]):
            values = np.sort(one.value)
            shares = np.arange(1, len(values) + 1) / len(values)
            axis.step(values, shares, color=matplotlib.colormaps["viridis"](layer / layers), linewidth=0.7)
        for scale in of[of.method == "grid"].value:
            axis.axvline(scale, color="0.5", linestyle=":")
        axis.set(xscale="log", xlabel=f"INT8 scale of {name} (dotted: buckets)", ylabel="share of chunks")
    axes[0].set_title("a line for each head, dark: first layer", fontsize=8)
    each = len(observed) // len(observed.groupby(["layer", "head"]))
    drawn.suptitle(f"{subject(rows)}, n = {each} chunks a head", fontsize=9)
    return drawn


def need(rows: pd.DataFrame) -> Figure:
    """What a head is worth against how many keys it needs: a point for each head, coloured by layer.

    Loss increase without the head, and where it alone keeps the least retention that was measured; below 1e-5 nat, and
    decreases, are shown as that.
    """
    sparse = rows[rows.metric == "sensitivity_loss"]
    least = sparse.retention.min()
    place = ["layer", "head"]
    ablated = rows[(rows.metric == "loss_increase") & (rows["head"] >= 0)].set_index(place).value
    kept = sparse[sparse.retention == least].set_index(place).value.reindex(ablated.index)
    drawn, axes = new_figure(columns=1)
    colour = ablated.index.get_level_values("layer")
    points = axes.scatter(ablated.clip(lower=1e-5), kept.clip(lower=1e-5), c=colour, cmap="viridis", s=18)
    axes.figure.colorbar(points, ax=axes, label="layer")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="loss increase without the head (nat)",
        ylabel=f"loss increase at {least:.0%} of its keys (nat)",
    )
    axes.set_title(f"{subject(rows)}, a point for each of n = {len(ablated)} heads", fontsize=8)
    return drawn


def allocators(rows: pd.DataFrame) -> Figure:
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


def races(rows: pd.DataFrame) -> Figure:
    """How near races come to the exact profile, against the work that they save: a marker for each order of the windows."""
    panels = {
        "rank_correlation": "rank correlation of heads",
        "retention_largest_difference": "largest difference of a retention",
    }
    drawn, axes = new_figure(columns=2)
    for axis, (metric, label) in zip(axes, panels.items(), strict=True):
        for marker, (method, of) in zip("osD", rows[rows.seed > 0].groupby("method", sort=False), strict=True):
            cells = of.pivot(index="seed", columns="metric", values="value")
            axis.plot(cells.times_fewer_forwards, cells[metric], marker, markersize=4, fillstyle="none", label=method)
        axis.set(xlabel="times fewer forward passes than exact on all windows", ylabel=label)
    axes[0].legend(fontsize=7)
    orders = rows.seed[rows.seed > 0].nunique()
    drawn.suptitle(f"{subject(rows)}, {orders} orders of the windows · measured", fontsize=9)
    return drawn
