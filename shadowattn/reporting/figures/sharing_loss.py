"""What sharing a list adds to the loss of per-row lists, against the rows that share it; and loss against time."""

import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowattn.reporting.sharing import sharing_losses
from shadowattn.reporting.style import MARKERS, new_figure, subject

_FASTER = "times_faster_than_dense"


def draw(rows: pd.DataFrame, tolerance: float) -> Figure:
    """A panel a retention, a line for each way to score a block with its 95 % intervals; dashed: `tolerance` nat.

    Then a panel for each way to score a block: loss above dense against how much faster than dense attention a chunk is, a
    line for each number of rows that share a list, through all retentions. Below and right is better.
    """
    losses = sharing_losses(rows)
    retentions = sorted(losses.retention.unique())
    scores = list(dict.fromkeys(losses.block_score)) if (rows.metric == _FASTER).any() else []
    panels = len(retentions) + len(scores)
    columns = 2 if panels == 4 else min(panels, 3)
    drawn, axes = new_figure(columns=columns, rows=-(-panels // columns))
    axes = np.ravel(axes)
    for axis, retention in zip(axes, retentions, strict=False):
        here = losses[losses.retention == retention]
        for marker, (score, line) in zip(MARKERS, here.groupby("block_score", sort=False), strict=False):
            reach = [(line.loss - line.low).to_numpy(), (line.high - line.loss).to_numpy()]
            axis.errorbar(line.query_block, line.loss, yerr=reach, marker=marker, markersize=4, label=score, capsize=2)
        axis.axhline(tolerance, color="0.4", linestyle="--", label=f"{tolerance:g} nat")
        axis.set(xlabel="query rows that share a list", title=f"{retention:.0%} of the keys", xscale="log")
        axis.set_yscale("symlog", linthresh=tolerance)  # linear up to the tolerance: differences may be negative
        axis.yaxis.set_major_locator(matplotlib.ticker.SymmetricalLogLocator(base=10, linthresh=tolerance, subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axis.set_xticks(sorted(here.query_block.unique()), [str(block) for block in sorted(here.query_block.unique())])
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes[0].set_ylabel("loss above per-row lists, nat")
    axes[0].legend(fontsize=7)
    for axis, score in zip(axes[len(retentions) :], scores, strict=False):
        _loss_against_time(axis, rows, score)
    for axis in axes[panels:]:
        axis.axis("off")
    timed = rows[rows.metric == _FASTER]
    times = f"; times of {timed.context_tokens.iloc[0]} keys, random tensors, n = {timed.n.iloc[0]}" if scores else ""
    drawn.suptitle(
        f"{subject(rows)}: what sharing a list adds to the loss; bars: 95 %, paired, n = {losses.n.iloc[0]} windows\n"
        f"{rows.measured.iloc[0]}, kernel {rows[rows.query_block > 1].kernel.iloc[0]}{times}",
        fontsize=9,
    )
    return drawn


def _loss_against_time(axis: Axes, rows: pd.DataFrame, score: str) -> None:
    placed = ["method", "retention"]
    cells = rows[rows.metric.isin((_FASTER, "loss_increase"))].drop_duplicates([*placed, "metric"])
    cells = cells[(cells.retention < 1) & ((cells.query_block == 1) | (cells.block_score == score)) & (cells.method != "dense")]
    values = cells.pivot(index=[*placed, "query_block"], columns="metric", values="value").dropna().reset_index()
    blocks = sorted(values.query_block.unique())
    for place, block in enumerate(blocks):
        line = values[values.query_block == block].sort_values("retention")
        colour = colormaps["viridis"](0.9 * place / max(1, len(blocks) - 1))
        label = "a list for each row" if block == 1 else f"a list for {block} rows"
        axis.plot(line[_FASTER], line.loss_increase, marker=MARKERS[place], markersize=4, color=colour, label=label)
        for point in line.itertuples() if block == 1 else ():
            axis.annotate(
                f"{point.retention:.0%}", (getattr(point, _FASTER), point.loss_increase), fontsize=7, xytext=(4, 4),
                textcoords="offset points",
            )  # fmt: skip
    axis.axvline(1, color="0.6", linewidth=1)
    axis.set(xlabel="times faster than our dense attention", ylabel="loss above dense, nat")
    if (values.loss_increase > 0).all():
        axis.set_yscale("log")
    axis.set_title(f"loss against time, `{score}`", fontsize=9)
    axis.legend(fontsize=7)
