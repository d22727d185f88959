"""What sharing a list adds to the loss of per-row lists, against the rows that share it, at every retention."""

import matplotlib.ticker
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.sharing import sharing_losses
from shadowattn.reporting.style import MARKERS, new_figure, subject


def draw(rows: pd.DataFrame, tolerance: float) -> Figure:
    """A panel a retention, a line for each way to score a block with its 95 % intervals; dashed: `tolerance` nat."""
    losses = sharing_losses(rows)
    retentions = sorted(losses.retention.unique())
    drawn, axes = new_figure(columns=len(retentions))
    for axis, retention in zip(axes, retentions, strict=True):
        here = losses[losses.retention == retention]
        for marker, (score, line) in zip(MARKERS, here.groupby("block_score", sort=False), strict=False):
            reach = [(line.loss - line.low).to_numpy(), (line.high - line.loss).to_numpy()]
            axis.errorbar(line.query_block, line.loss, yerr=reach, marker=marker, markersize=4, label=score, capsize=2)
        axis.axhline(tolerance, color="0.4", linestyle="--", label=f"{tolerance:g} nat")
        axis.set(xlabel="query rows that share a list", title=f"{retention:.0%} of the keys", xscale="log")
        axis.set_yscale("symlog", linthresh=tolerance)  # linear up to the tolerance: differences may be negative
        axis.set_xticks(sorted(here.query_block.unique()), [str(block) for block in sorted(here.query_block.unique())])
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes[0].set_ylabel("loss above per-row lists, nat")
    axes[0].legend(fontsize=7)
    drawn.suptitle(
        f"{subject(rows)}: what sharing a list adds to the loss; bars: 95 %, paired, n = {losses.n.iloc[0]} windows · "
        f"{rows.measured.iloc[0]}, kernel {rows[rows.query_block > 1].kernel.iloc[0]}",
        fontsize=9,
    )
    return drawn
