"""Figures, each a pure function of rows: fresh ones, or those that were committed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.axis
import matplotlib.colors
import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_QUALITY = {
    "loss_increase": "loss increase over dense (nat)",
    "kl_divergence": "KL divergence from dense (nat)",
    "mass_recall": "recall of attention mass",
    "topk_overlap": "overlap with the exact top-k",
    "output_error": "relative output error",
}
_MARKERS = "osDv^<>P*X"
# In the column `allocator`: the method attends to every key.
ALL_KEYS = "all"
# Densities that differ by a smaller share than this are the same number of keys.
EQUAL_DENSITY = 0.01


def quality_against_retention(rows: pd.DataFrame) -> Figure:
    """Loss increase and fidelity of every method: against retention, or where there are one or two, as dots.

    Methods that attend to every key, in other arithmetic, are a level across the panel, or a dot at retention 1.
    """
    whole = attending_to_all(rows)
    sparse = rows[(rows.method != "dense") & (rows.retention < 1)]  # at 1 every method that estimates is dense
    shown = pd.concat([sparse, whole])
    errors = shown[shown.metric == "loss_increase_error"].set_index(["method", "retention"])
    few = sparse.retention.nunique() < 3
    panels = [metric for metric in _QUALITY if metric != "kl_divergence" or (rows.metric == metric).any()]
    drawn, axes = new_figure(columns=2 if len(panels) == 4 else 3, rows=2)
    for axis, metric in zip(axes.flat, panels, strict=False):
        of = (shown if few else sparse)[lambda frame, metric=metric: frame.metric == metric].set_index(["method", "retention"])
        error = errors.value.reindex(of.index) if metric == "loss_increase" else of.value * 0
        (_dots if few else _lines_with_errors)(axis, of.value, error)
        levels = whole[whole.metric == metric]
        if not few:
            levels(axis, levels)
        axis.set(**{"xlabel" if few else "ylabel": _QUALITY[metric]})
        if metric in ("loss_increase", "kl_divergence"):
            positive = (of.value > 0).all() and (levels.value > 0).all()
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
    devices = ", ".join(sorted(set(rows.estimate_device) - {"none"})) or "no device"
    windows = f"n = {errors.n.iloc[0]} windows of {first.context_tokens} tokens" if len(errors) else f"n = {first.n} tokens"
    drawn.suptitle(
        f"{subject(rows)}, {windows}, loss ± one standard error · {first.measured}, INT8 estimate on {devices}, "
        f"kernel {first.kernel}",
        fontsize=9,
    )
    return drawn


def _lines_with_errors(axis: Axes, values: pd.Series, errors: pd.Series) -> None:
    """A line for each method, with bars where there are errors."""
    for index, method in enumerate(values.index.unique("method")):
        line = values.xs(method, level="method").sort_index()
        reach = errors.xs(method, level="method").reindex(line.index)
        look = {"marker": _MARKERS[index % len(_MARKERS)], "markersize": 5, "linewidth": 1.2, "capsize": 2}
        if index % 2:  # hollow and dashed, so that a line on top of another hides nothing
            look |= {"fillstyle": "none", "linestyle": "--", "zorder": 3}
        axis.errorbar(line.index, line, yerr=reach, label=method, **look)


def _dots(axis: Axes, values: pd.Series, errors: pd.Series) -> None:
    """A line of the panel for each method, a marker for each retention."""
    methods = list(values.index.unique("method"))
    for index, (marker, at) in enumerate(zip(_MARKERS, sorted(values.index.unique("retention")), strict=False)):
        of = values.xs(at, level="retention").reindex(methods)
        places = np.arange(len(methods)) + 0.15 * (index - 0.5)
        reach = errors.xs(at, level="retention").reindex(methods)
        axis.errorbar(of, places, xerr=reach, linestyle="none", marker=marker, markersize=5, capsize=2, label=f"retention {at:g}")
    axis.set_yticks(range(len(methods)), methods)
    axis.grid(axis="y", color="0.9")
    axis.invert_yaxis()


def quality_against_query_block(rows: pd.DataFrame) -> Figure:
    """What lists shared by more rows cost and save, a line for each way to score a block; per-row lists begin every line.

    Beside it the measured density: methods compare where it is equal, the grey band.
    """
    panels = {
        "loss_increase": "loss increase over dense, nat",
        "accuracy": "retrieval accuracy",
        "mass_recall": "recall of attention mass",
        "density": "density: share of visible keys attended to",
        "times_faster_than_dense": "times faster than our own dense",
    }
    whole = attending_to_all(rows)
    sparse = rows[(rows.method != "dense") & ~rows.method.isin(whole.method)]
    per_row = sparse[sparse.query_block == 1]
    errors = sparse[sparse.metric == "loss_increase_error"].set_index("method")
    drawn, axes = new_figure(columns=3, rows=2)
    for axis, (metric, label) in zip(axes.flat, panels.items(), strict=False):
        start = per_row[per_row.metric == metric]
        for marker, (score, group) in zip(_MARKERS, sparse[sparse.query_block > 1].groupby("block_score"), strict=False):
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
    axes[1, 2].legend(*axes[0, 1].get_legend_handles_labels(), fontsize=8, loc="center", frameon=False)
    axes[1, 2].axis("off")
    first, windows = sparse.iloc[0], errors.n.iloc[0]
    drawn.suptitle(
        f"{first.model} on {first.data}, retention {first.retention:g}, n = {windows} windows (loss ± standard error) · "
        f"measured, kernel {first.kernel}; times on random tensors",
        fontsize=9,
    )
    return drawn


def sweep(rows: pd.DataFrame, metric: str) -> Figure:
    """One metric of every job of a sweep, a line for each method: against the retention where jobs differ in it, else by job."""
    of = rows[rows.metric == metric]
    whole = attending_to_all(of)
    dense, sparse = of[of.method == "dense"], of[(of.method != "dense") & ~of.method.isin(whole.method)]
    by_retention = sparse.retention.nunique() > 1
    jobs = list(dict.fromkeys(rows.job))
    drawn, axes = new_figure(columns=2 if len(jobs) > 4 else 1)
    axis = np.atleast_1d(axes)[0]
    if len(jobs) > 4:  # room for the legend, and for long names
        np.atleast_1d(axes)[1].axis("off")
    lines_of = sparse if len(sparse) else of
    names = ["method"] if not by_retention else ["method", *(["job"] if _more_than_retention(lines_of) else [])]
    for marker, (name, line) in zip(_MARKERS * 9, lines_of.groupby(names, sort=False), strict=False):
        x = line.retention if by_retention else [jobs.index(job) for job in line.job]
        order = np.argsort(np.asarray(x), kind="stable")
        label = " ".join(map(str, name))
        axis.plot(np.asarray(x)[order], line.value.to_numpy()[order], marker=marker, markersize=4, label=label)
    if len(dense) and dense.value.nunique() == 1 and len(sparse):
        axis.axhline(dense.value.iloc[0], color="0.5", linestyle="--", label="dense")
    levels(axis, whole.groupby("method", sort=False).filter(lambda one: one.value.nunique() == 1).drop_duplicates("method"))
    if by_retention:
        axis.set(xlabel="retention (kept fraction of visible keys)")
    else:
        axis.set_xticks(range(len(jobs)), jobs, rotation=20, ha="right", fontsize=7)
    axis.set(ylabel=f"{metric.replace('_', ' ')} ({of.unit.iloc[0]})" if of.unit.iloc[0] != "1" else metric.replace("_", " "))
    drawn.legend(*axis.get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    ns = sorted(of.n.unique())
    axis.set_title(f"{', '.join(sorted(set(of.model)))}, n = {' to '.join(map(str, dict.fromkeys([ns[0], ns[-1]])))}", fontsize=8)
    return drawn


def _more_than_retention(rows: pd.DataFrame) -> bool:
    """Whether jobs differ in something besides the retention: a method then has several values at one."""
    return rows.duplicated(["method", "retention"]).any()


def head_importance(rows: pd.DataFrame) -> Figure:
    """Loss increase for each head (left) and each layer (right) ablated; Fig. 6 of the paper for a whole model."""
    ablated = rows[(rows.metric == "loss_increase") & (rows.layer >= 0)]
    heads = ablated[ablated["head"] >= 0]
    layers = ablated[ablated["head"] < 0].sort_values("layer")
    drawn, axes = new_figure(columns=2)
    # A few heads outweigh all others by orders of magnitude. Increases below 1e-4 nat, and decreases, are shown as that.
    norm = matplotlib.colors.LogNorm(1e-4, max(1e-3, heads.value.max()))
    ablation = heads.method.iloc[0].removeprefix("ablate_")
    title = f"loss increase without the head (nat, {ablation})"
    heat_map(axes[0], _by_head(heads).clip(min=1e-4), title, norm)
    axes[1].barh(layers.layer, layers.value, color="tab:blue")
    axes[1].set_xscale("symlog", linthresh=0.01)
    axes[1].set(xlabel="loss increase without the layer (nat)", ylabel="layer")
    axes[1].invert_yaxis()
    drawn.suptitle(f"{subject(rows)}, n = {heads.n.iloc[0]} tokens", fontsize=9)
    return drawn


def loss_by_position(rows: pd.DataFrame) -> Figure:
    """Loss of held-out text at every position of a window, averaged over runs of positions that grow with the position."""
    at = rows[rows.metric.str.startswith("loss_at_")]
    losses = at.value.to_numpy()
    drawn, axes = new_figure(columns=1)
    edges = np.unique(np.geomspace(1, len(losses), 24).astype(int))
    means = [np.mean(losses[low:high]) for low, high in pairwise(edges)]
    axes.plot(np.sqrt(edges[:-1] * edges[1:]), means, marker="o", markersize=3)
    axes.set(xscale="log", xlabel="position in the window (tokens)", ylabel="loss on held-out text (nat)")
    axes.set_title(f"{subject(rows)}, n = {at.n.iloc[0]} windows", fontsize=8)
    return drawn


def retention_maps(rows: pd.DataFrame) -> Figure:
    """The retention of every head, a panel for each method and mean retention, all on one scale."""
    placed = rows[(rows.metric == "retention") & (rows["head"] >= 0)]
    maps = {key: _by_head(of) for key, of in placed.groupby(["method", "retention"], sort=False)}
    columns = min(3, len(maps))
    drawn, axes = new_figure(columns=columns, rows=-(-len(maps) // columns))
    flat = np.atleast_1d(axes).ravel()
    for axis, ((method, retention), values) in zip(flat, maps.items(), strict=False):
        heat_map(axis, values, f"{method}, mean {retention:g}", matplotlib.colors.Normalize(0, 1))
    for axis in flat[len(maps) :]:
        axis.axis("off")
    drawn.suptitle(f"retention of every head: {subject(rows)}", fontsize=9)
    return drawn


def plain_ticks(axis: matplotlib.axis.Axis) -> None:
    """Numbers of a logarithmic axis as they are written, at 1, 2 and 5: 0.2, not 2 × 10⁻¹."""
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def attending_to_all(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of methods that attend to every key, in other arithmetic than dense attention: no allocator says how many."""
    return rows[rows.allocator == ALL_KEYS]


def subject(rows: pd.DataFrame) -> str:
    """What rows are about, for a title."""
    first = rows.iloc[0]
    return f"{first.model} on {first.data}"


def _by_head(rows: pd.DataFrame) -> np.ndarray:
    """Values of rows that are placed, [L, H]."""
    return rows.pivot_table(index="layer", columns="head", values="value").to_numpy()


def lines(axis: Axes, rows: pd.DataFrame, errors: pd.Series | None = None) -> None:
    """A line of values against retention for each method; `errors` by method and retention."""
    for marker, (method, group) in zip(_MARKERS, rows.groupby("method", sort=False), strict=False):
        group = group.sort_values("retention")
        reach = None if errors is None else [errors.get((method, at), np.nan) for at in group.retention]
        axis.errorbar(group.retention, group.value, yerr=reach, marker=marker, markersize=4, capsize=2, label=method)


def levels(axis: Axes, rows: pd.DataFrame) -> None:
    """A dotted line across the panel for each method that has one value, whatever the retention."""
    for index, row in enumerate(rows.itertuples()):
        axis.axhline(row.value, color=str(0.2 + 0.1 * (index % 5)), linestyle=":", label=f"{row.method}, every key")


def heat_map(axis: Axes, values: np.ndarray, title: str, norm: matplotlib.colors.Normalize | None = None) -> None:
    image = axis.imshow(values, aspect="auto", cmap="viridis", norm=norm)
    axis.figure.colorbar(image, ax=axis)
    axis.set(xlabel="head", ylabel="layer", title=title)
    axis.title.set_fontsize(9)
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axis.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def new_figure(*, columns: int, rows: int = 1) -> tuple[Figure, Any]:
    """A figure and its axes: one, or an array of `rows` × `columns`, flat where there is one row or one column."""
    figure = Figure(figsize=(4.8 * columns, 3.4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns)


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG, without a date, so that the same rows give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return path
