"""Per-row lists read by tiles of rows: the size of a tile's union, and the time of attention by it."""

import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure

_TIMES = {
    "shared_lists": "one list for the tile (other keys)",
    "union_tiles_read": "union tiles, unions made before",
    "union_tiles": "union tiles",
}


def draw(rows: pd.DataFrame) -> Figure:
    """Above the union against rows of a tile, as lists of a row and as share of the keys; below the time, by retention.

    Of the union the mean over heads, and a band from the best head to the worst; grey, of rows that keep keys independently.
    """
    retentions = sorted(rows.retention[rows.metric == "union_ratio"].unique())
    timed = rows[(rows.metric == "times_faster_than_own_dense")]
    drawn, axes = new_figure(columns=max(3, len(retentions)), rows=2 if len(timed) else 1)
    axes = np.atleast_2d(axes)
    _sizes(axes[0], rows, retentions)
    for axis, retention in zip(axes[1] if len(timed) else (), retentions, strict=False):
        _speed(axis, timed[timed.retention == retention], retention)
    if len(timed):
        axes[1, 0].legend(fontsize=7)
    for axis in (*axes[0, 3:], *(axes[1, len(retentions) :] if len(timed) else ())):
        axis.axis("off")
    first = rows[rows.metric == "union_ratio"].iloc[0]
    times = f"; times of kernel {timed.kernel.iloc[0]}, {timed.dtype.iloc[0]}, medians of {timed.n.iloc[0]}" if len(timed) else ""
    drawn.suptitle(
        f"{first.model} on {first.data}, last {first.chunk_rows} rows of {first.context_tokens} tokens, lists by "
        f"{first.estimator} · measured{times}",
        fontsize=9,
    )
    return drawn


def _sizes(axes: np.ndarray, rows: pd.DataFrame, retentions: list[float]) -> None:
    sizes = rows[rows.estimator == rows.estimator[rows.metric == "union_ratio"].iloc[0]]
    for marker, retention in zip(MARKERS, retentions, strict=False):
        tile_rows = sizes[sizes.retention == retention].sort_values("tile")
        ratio, share, best, worst = (
            tile_rows[tile_rows.metric == metric].set_index("tile").value
            for metric in ("union_ratio", "union_share", "best_head_union_ratio", "worst_head_union_ratio")
        )
        (line,) = axes[0].plot(ratio.index, ratio, marker=marker, markersize=4, label=f"retention {retention:g}")
        axes[0].fill_between(best.index, best, worst, color=line.get_color(), alpha=0.15)
        independent = 1 - (1 - retention) ** ratio.index
        label = "rows that choose independently" if retention == retentions[-1] else None
        axes[0].plot(ratio.index, independent / retention, color="0.6", linestyle=":", label=label)
        axes[1].plot(share.index, share, marker=marker, markersize=4, label=f"retention {retention:g}")
        axes[1].plot(share.index, independent, color="0.6", linestyle=":")
    tiles = sorted(sizes.tile[sizes.metric == "union_ratio"].unique())
    axes[0].set(ylabel="|union| / k, mean and range of heads", yscale="log")
    axes[1].set(ylabel="|union| / visible keys")
    for axis in axes[:2]:
        _tile_axis(axis, tiles)
    axes[0].legend(fontsize=7)
    head = sizes[(sizes.metric == "layer_union_ratio") & (sizes.tile == tiles[-1])]
    for marker, (retention, layer_rows) in zip(MARKERS, head.groupby("retention"), strict=False):
        axes[2].plot(layer_rows.layer, layer_rows.value, marker=marker, markersize=4, label=f"retention {retention:g}")
    axes[2].set(xlabel="layer", ylabel=f"|union| / k, tiles of {tiles[-1]} rows")
    axes[2].xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def _speed(axis: Axes, timed: pd.DataFrame, retention: float) -> None:
    tiled = timed[timed.tile > 0]
    for marker, (method, label) in zip(MARKERS, _TIMES.items(), strict=False):
        line = tiled[tiled.method == method].sort_values("tile")
        axis.plot(line.tile, line.value, marker=marker, markersize=4, label=label)
    whole = timed[timed.tile == 0].set_index("method").value
    for style, (method, label) in zip(("-", "--"), (("per_row", "per-row lists"), ("sdpa", "SDPA")), strict=True):
        axis.axhline(whole[method], color="0.3", linestyle=style, linewidth=1, label=label)
    axis.axhline(1, color="0.7", linewidth=0.8)
    axis.set(ylabel="times faster than our own dense", ylim=(0, None))
    axis.set_title(f"attention at retention {retention:g}", fontsize=9)
    _tile_axis(axis, sorted(tiled.tile.unique()))


def _tile_axis(axis: Axes, tiles: list[int]) -> None:
    axis.set(xlabel="rows of a tile", xscale="log")
    axis.set_xticks(tiles, [str(tile) for tile in tiles])
    axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
