"""Figures of the offline stage: the paper's Fig. 6 and Fig. 7 from our rows, retentions, and allocators side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.colors
import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np
import pandas as pd

from shadowattn.reporting.figures import figure, heat_map, lines
from shadowattn.reporting.verdicts import gains
from shadowattn.types import Importance, ScaleGrid


def fig6(importance: Importance, path: Path) -> Path:
    """Fig. 6: perplexity with each head of the first layer ablated (a), with each layer bypassed (b, logarithmic)."""
    with figure(path, columns=2) as axes:
        axes[0].bar(np.arange(len(importance.head_ppl[0])), importance.head_ppl[0], color="tab:blue")
        axes[0].set(xlabel="head of the first layer", ylabel=f"perplexity without it ({importance.ablation})")
        axes[1].bar(np.arange(len(importance.layer_ppl)), importance.layer_ppl, color="tab:blue")
        axes[1].set(xlabel="layer", ylabel="perplexity without it", yscale="log")
        for axis in axes:
            axis.axhline(importance.base_ppl, color="0.5", linestyle="--", label="nothing ablated")
            axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes[0].set_yscale("log")
        axes[0].legend(fontsize=7)
    return path


def fig7(pairs: Sequence[tuple[int, int, float, float]], grid: ScaleGrid, path: Path) -> Path:
    """Fig. 7: cumulative distribution of the INT8 scales of Q and of K, a line for each head of each layer."""
    observed = np.array(pairs)
    with figure(path, columns=2) as axes:
        heads = sorted({(int(layer), int(head)) for layer, head in observed[:, :2]})
        layers = max(layer for layer, _ in heads) or 1
        for axis, column, name, scales in zip(axes, (2, 3), "QK", (grid.q_scales, grid.k_scales), strict=True):
            for layer, head in heads:
                values = np.sort(observed[(observed[:, 0] == layer) & (observed[:, 1] == head), column])
                shares = np.arange(1, len(values) + 1) / len(values)
                axis.step(values, shares, color=plt.cm.viridis(layer / layers), linewidth=0.7)
            for scale in scales:
                axis.axvline(scale, color="0.5", linestyle=":")
            axis.set(xscale="log", xlabel=f"INT8 scale of {name} (dotted: buckets)", ylabel="share of chunks")
        axes[0].set_title("a line for each head, dark: first layer", fontsize=8)
    return path


def need(rows: pd.DataFrame, path: Path) -> Path:
    """What a head is worth against how many keys it needs: a point for each head, coloured by layer.

    Loss increase without the head, and where it alone keeps the least retention that was measured; below 1e-5 nat, and
    decreases, are shown as that.
    """
    sparse = rows[rows.metric == "sensitivity_loss"]
    least = sparse.retention.min()
    place = ["layer", "head"]
    ablated = rows[(rows.metric == "loss_increase") & (rows["head"] >= 0)].set_index(place).value
    kept = sparse[sparse.retention == least].set_index(place).value.reindex(ablated.index)
    with figure(path, columns=1) as axes:
        colour = ablated.index.get_level_values("layer")
        points = axes.scatter(ablated.clip(lower=1e-5), kept.clip(lower=1e-5), c=colour, cmap="viridis", s=18)
        axes.figure.colorbar(points, ax=axes, label="layer")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="loss increase without the head (nat)",
            ylabel=f"loss increase at {least:.0%} of its keys (nat)",
        )
    return path


def retention_maps(profiles: Mapping[str, Sequence[Sequence[float]]], path: Path) -> Path:
    """The retention of every head, a panel for each profile by its title, all on one scale."""
    columns = min(3, len(profiles))
    rows = -(-len(profiles) // columns)
    norm = matplotlib.colors.Normalize(0, 1)
    with figure(path, columns=columns, rows=rows) as axes:
        flat = np.atleast_1d(axes).ravel()
        for axis, (title, retention) in zip(flat, profiles.items(), strict=False):
            heat_map(axis, np.array(retention), title, norm)
        for axis in flat[len(profiles) :]:
            axis.axis("off")
    return path


def allocators(rows: pd.DataFrame, path: Path) -> Path:
    """Loss increase, retrieval and recall of attention mass against retention, a line for each allocator; and what each gains
    over uniform budgets. Methods of another estimator stand beside the others in retrieval alone."""
    sparse = rows[rows.method != "dense"]
    estimator = sparse.estimator.iloc[0]
    panels = {"loss_increase": "loss increase over dense (nat)", "accuracy": "retrieval, exact match"}
    panels = {name: label for name, label in panels.items() if name in set(rows.metric)}
    panels["mass_recall"] = "recall of attention mass"
    found = gains(rows)
    found = found[found.rival == "uniform"]
    with figure(path, columns=len(panels) + bool(len(found))) as axes:
        axes = np.atleast_1d(axes)
        for axis, (metric, label) in zip(axes, panels.items(), strict=False):
            lines(axis, sparse[(sparse.metric == metric) & ((sparse.estimator == estimator) | (metric == "accuracy"))])
            dense = rows[(rows.metric == metric) & (rows.method == "dense")]
            if len(dense):
                axis.axhline(dense.value.iloc[0], color="0.5", linestyle="--", label="dense")
            axis.set(xlabel="mean retention", ylabel=label)
            axis.set_xticks(sorted(sparse.retention.unique()))
            if metric == "accuracy":
                axis.set_ylim(-0.05, 1.05)
                axis.legend(fontsize=7)
        positive = rows[rows.metric == "loss_increase"].value.min() > 0
        axes[0].set_yscale("log") if positive else axes[0].set_yscale("symlog", linthresh=0.001)
        axes[0].legend(fontsize=7)
        if len(found):
            _gains(axes[-1], found)
        row = sparse.iloc[0]
        axes[0].figure.suptitle(
            f"{row.model} on {row.data}, {row.context_tokens}-token windows · {row.measured}, estimator {row.estimator}, "
            f"kernel {row.kernel}",
            fontsize=9,
        )
    return path


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
