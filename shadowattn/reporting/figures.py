"""Figures, each a pure function of rows or of a stage's result; all return the file they wrote."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import matplotlib
import matplotlib.colors
import matplotlib.ticker

matplotlib.use("Agg")  # no screen needed
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from shadowattn.types import Importance, ScaleGrid

_QUALITY = {
    "perplexity": "perplexity on held-out text",
    "mass_recall": "recall of attention mass",
    "topk_overlap": "overlap with the exact top-k",
    "output_error": "relative output error",
}
_MARKERS = "osDv^<>P*X"
# Densities that differ by a smaller share than this are the same number of keys.
EQUAL_DENSITY = 0.01


def quality_against_retention(rows: pd.DataFrame, path: Path) -> Path:
    """Perplexity and the three fidelity figures against retention, a line a method; dense as a grey line."""
    with figure(path, columns=2, rows=2) as axes:
        for axis, (metric, label) in zip(axes.flat, _QUALITY.items(), strict=True):
            lines(axis, rows[(rows.metric == metric) & (rows.method != "dense")])
            dense = rows[(rows.metric == metric) & (rows.method == "dense")]
            if len(dense):
                axis.axhline(dense.value.iloc[0], color="0.5", linestyle="--", label="dense")
            axis.set(xlabel="retention (kept fraction of visible keys)", ylabel=label, xscale="log")
            if metric == "perplexity":
                axis.set_yscale("log")
            axis.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
            axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
            axis.set_xticks(sorted(rows[rows.method != "dense"].retention.unique()))
        axes[0, 0].legend(fontsize=8)
        first = rows.iloc[0]
        devices = ", ".join(sorted(set(rows.estimate_device) - {"none"})) or "no device"
        axes[0, 0].figure.suptitle(
            f"{first.model} on {first.data}, {first.context_tokens}-token windows · {first.measured}, "
            f"INT8 estimate on {devices}, kernel {first.kernel}",
            fontsize=9,
        )
    return path


def quality_against_query_block(rows: pd.DataFrame, path: Path) -> Path:
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
    sparse = rows[rows.method != "dense"]
    per_row = sparse[sparse.query_block == 1]
    errors = sparse[sparse.metric == "loss_increase_error"].set_index("method")
    with figure(path, columns=3, rows=2) as axes:
        for axis, (metric, label) in zip(axes.flat, panels.items(), strict=False):
            start = per_row[per_row.metric == metric]
            for marker, (score, group) in zip(_MARKERS, sparse[sparse.query_block > 1].groupby("block_score"), strict=False):
                line = pd.concat([start, group[group.metric == metric]]).sort_values("query_block")
                error = errors.value.reindex(line.method).to_numpy() if metric == "loss_increase" else None
                axis.errorbar(line.query_block, line.value, yerr=error, marker=marker, markersize=4, label=score, capsize=2)
            dense = rows[(rows.method == "dense") & (rows.metric == metric)]
            if metric == "accuracy" and len(dense):
                axis.axhline(dense.value.iloc[0], color="0.5", linestyle="--", label="dense")
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
        axes[0, 0].figure.suptitle(
            f"{first.model} on {first.data}, retention {first.retention:g}, n = {windows} windows (loss ± standard error) · "
            f"measured, kernel {first.kernel}; times on random tensors",
            fontsize=9,
        )
    return path


def head_importance(importance: Importance, path: Path) -> Path:
    """Loss increase for each head (left) and each layer (right) ablated; Fig. 6 of the paper for a whole model."""
    base = np.log(importance.base_ppl)
    heads = np.log(np.array(importance.head_ppl)) - base
    layers = np.log(np.array(importance.layer_ppl)) - base
    with figure(path, columns=2) as axes:
        # A few heads outweigh all others by orders of magnitude. Increases below 1e-4 nat, and decreases, are shown as that.
        norm = matplotlib.colors.LogNorm(1e-4, max(1e-3, heads.max()))
        heat_map(axes[0], heads.clip(min=1e-4), f"loss increase without the head (nat, {importance.ablation})", norm)
        axes[1].barh(np.arange(len(layers)), layers, color="tab:blue")
        axes[1].set_xscale("symlog", linthresh=0.01)
        axes[1].set(xlabel="loss increase without the layer (nat)", ylabel="layer")
        axes[1].invert_yaxis()
    return path


def loss_by_position(losses: list[float], path: Path) -> Path:
    """Loss of held-out text at every position of a window, averaged over runs of positions that grow with the position."""
    with figure(path, columns=1) as axes:
        edges = np.unique(np.geomspace(1, len(losses), 24).astype(int))
        means = [np.mean(losses[low:high]) for low, high in pairwise(edges)]
        axes.plot(np.sqrt(edges[:-1] * edges[1:]), means, marker="o", markersize=3)
        axes.set(xscale="log", xlabel="position in the window (tokens)", ylabel="loss on held-out text (nat)")
    return path


def retention_map(retention: list[list[float]], path: Path, title: str) -> Path:
    """The retention of every head."""
    with figure(path, columns=1) as axes:
        heat_map(axes, np.array(retention), title)
    return path


def scale_distribution(pairs: list[tuple[int, int, float, float]], grid: ScaleGrid, path: Path) -> Path:
    """Cumulative distribution of the observed Q and K scales, a line a layer, with the grid's scales; Fig. 7 of the paper."""
    observed = np.array(pairs)
    with figure(path, columns=2) as axes:
        for axis, column, name, scales in zip(axes, (2, 3), "QK", (grid.q_scales, grid.k_scales), strict=True):
            layers = np.unique(observed[:, 0])
            for layer in layers:
                values = np.sort(observed[observed[:, 0] == layer, column])
                color = plt.cm.viridis(layer / max(layers.max(), 1))
                axis.step(values, np.arange(1, len(values) + 1) / len(values), color=color, label=f"layer {int(layer)}")
            for scale in scales:
                axis.axvline(scale, color="0.5", linestyle=":")
            axis.set(xscale="log", xlabel=f"INT8 scale of {name} (dotted: buckets)", ylabel="share of heads and chunks")
        if len(layers) <= 12:
            axes[0].legend(fontsize=6)
    return path


def lines(axis: Axes, rows: pd.DataFrame) -> None:
    for marker, (method, group) in zip(_MARKERS, rows.groupby("method", sort=False), strict=False):
        group = group.sort_values("retention")
        axis.plot(group.retention, group.value, marker=marker, markersize=4, label=method)


def heat_map(axis: Axes, values: np.ndarray, title: str, norm: matplotlib.colors.Normalize | None = None) -> None:
    image = axis.imshow(values, aspect="auto", cmap="viridis", norm=norm)
    axis.figure.colorbar(image, ax=axis)
    axis.set(xlabel="head", ylabel="layer", title=title)
    axis.title.set_fontsize(9)
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axis.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


@contextmanager
def figure(path: Path, *, columns: int, rows: int = 1) -> Iterator:
    """Axes of a new figure; saved on leaving without a date, so that the same rows give the same file."""
    figure, axes = plt.subplots(rows, columns, figsize=(4.8 * columns, 3.4 * rows), layout="constrained")
    try:
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Software": None})
    finally:
        plt.close(figure)
