"""What lists lose beside how long a chunk with them takes, for lists of single rows, after a first look, and of blocks."""

import matplotlib.ticker
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.figures.activation_speed import ways
from shadowattn.reporting.style import MARKERS, new_figure, subject


def draw(losses: pd.DataFrame, times: pd.DataFrame, window_tokens: int) -> Figure:
    """A panel a dtype and length, a line a way to make lists, a mark a retention, the largest one lowest.

    `losses`: columns method, retention, loss, low and high, nat above dense attention, in windows of `window_tokens`. `times`:
    rows of a study of speed on a model's activations, whose methods of the same names are shown.
    """
    ratios = times[(times.metric == "times_faster_than_own_dense") & times.method.isin(losses.method)]
    losses = losses[losses.method.isin(ratios.method)]
    lengths = sorted({ratios.context_tokens.min(), ratios.context_tokens.max()})
    dtypes = list(ratios.dtype.unique())
    drawn, axes = new_figure(columns=len(lengths), rows=len(dtypes))
    for line, dtype in zip(axes, dtypes, strict=True):
        for axis, length in zip(line, lengths, strict=True):
            here = ratios[(ratios.dtype == dtype) & (ratios.context_tokens == length)].set_index(["method", "retention"]).value
            for marker, (method, cell) in zip(MARKERS, losses.groupby("method", sort=False), strict=False):
                faster = [here[method, at] for at in cell.retention]
                look = {"marker": marker, "markersize": 4, "capsize": 2, "label": ways(method)}
                axis.errorbar(faster, cell.loss, yerr=[cell.loss - cell.low, cell.high - cell.loss], **look)
            axis.axvline(1, color="0.6", linewidth=1)
            axis.set(xlabel="times faster than our dense attention", ylabel="loss above dense, nat", yscale="log")
            axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
            axis.set_title(f"{dtype}, times at {length} keys", fontsize=9)
    drawn.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=5)
    first, kept = ratios.iloc[0], ", ".join(f"{at:.0%}" for at in sorted(losses.retention.unique()))
    drawn.suptitle(
        f"{subject(times)}, {kept} of the keys; losses in windows of {window_tokens} tokens: those of a list for each row,\n"
        f"and paired differences from these, with their 95 % intervals · measured, {first.threads:.0f} threads, {first.kernel}",
        fontsize=9,
    )
    return drawn
