"""The speed of sparse attention beside torch's and our own dense attention."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.online.break_even import crossing
from shadowattn.reporting.rows import with_graphs_named
from shadowattn.reporting.style import new_figure

# By part of the study: the column on the horizontal axis, and what it is called.
AXES = {
    "retention": ("retention", "retention ({context_tokens} keys, chunk of {chunk_rows} queries)"),
    "keys": ("context_tokens", "keys (retention {retention:.3g}, chunk of {chunk_rows} queries)"),
}
SHOWN = {
    "own dense": ("0.4", "-"),
    "attend, per row": ("tab:blue", ":"),
    "total (int8_fused), per row": ("tab:blue", "-"),
    "total (int8_graph), per row": ("tab:green", "-"),
    "total (hierarchical), per row": ("tab:purple", "-"),
    "attend, 32-row blocks": ("tab:orange", ":"),
    "total (int8_fused), 32-row blocks, leading_query": ("tab:orange", "-"),
    "total (int8_graph), 32-row blocks, leading_query": ("tab:red", "-"),
}


def draw(rows: pd.DataFrame, part: str = "retention") -> Figure:
    """How many times faster than torch's dense attention, a panel a shape and dtype; break-evens with our own dense marked.

    `part` of the study: `retention`, or `keys` for the number of keys.
    """
    x, label = AXES[part]
    rows = with_graphs_named(rows[rows.part == part])
    if part == "keys" and rows.retention.nunique() > 1:
        label = "keys ({kept:.0f} of them kept, chunk of {chunk_rows} queries)"
    label = label.format(**rows.iloc[-1], kept=(rows.retention * rows.context_tokens).iloc[-1])
    shapes, dtypes, ticks = rows["model"].unique(), rows.dtype.unique(), sorted(rows[x].unique())
    # A column a shape; of a single shape the dtypes stand side by side.
    columns, lines = (len(dtypes), 1) if len(shapes) == 1 else (len(shapes), len(dtypes))
    figure, axes = new_figure(columns=columns, rows=lines)
    axes = np.array(axes).reshape(len(dtypes), len(shapes))
    for column, shape in enumerate(shapes):
        for line, dtype in enumerate(dtypes):
            axis, cell = axes[line, column], rows[(rows["model"] == shape) & (rows.dtype == dtype)]
            for name, (colour, style) in SHOWN.items():
                speeds = cell[(cell.method == name) & (cell.metric == "times faster than sdpa")].sort_values(x)
                if speeds.empty:
                    continue
                axis.plot(speeds[x], speeds.value, color=colour, linestyle=style, marker="o", markersize=3, label=name)
                axis.fill_between(speeds[x], speeds.low, speeds.high, color=colour, alpha=0.15, linewidth=0)
                dense = cell[(cell.method == name) & (cell.metric == "times faster than own dense")].sort_values(x)
                even = break_even(dense[x].to_numpy(), dense.value.to_numpy()) if x == "retention" and "total" in name else None
                if even:
                    axis.axvline(even, color=colour, linewidth=0.8, linestyle="--")
                    at = 0.98 - 0.06 * len(axis.texts)  # one below the other: break-evens lie close together
                    above = axis.get_xaxis_transform()  # x in data, y from 0 at the bottom to 1 at the top of the panel
                    axis.text(even, at, f"{even:.2f} ", color=colour, fontsize=7, ha="right", va="top", transform=above)
            axis.axhline(1, color="0.7", linewidth=0.8)
            axis.set_title(f"{shape}, {dtype}", fontsize=9)
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(ticks, [f"{v:g}" if x == "retention" else f"{v / 1024:g}k" for v in ticks])
            axis.xaxis.minorticks_off()  # within one decade they have labels, which meet those of the ticks
            axis.set_yticks([0.5, 1, 2, 4, 8, 16, 32])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.supxlabel(label + (" — dashed: break-even of the total with our own dense" if x == "retention" else ""), fontsize=9)
    figure.supylabel("times faster than torch SDPA of the same dtype", fontsize=9)
    figure.suptitle(caption(rows), fontsize=8)
    return figure


def break_even(retentions: np.ndarray, ratios: np.ndarray) -> float | None:
    """The retention at which a ratio falls to 1, linear between its neighbours; None where it never does."""
    return crossing(retentions, ratios) if ratios.max() >= 1 > ratios[-1] else None


def caption(rows: pd.DataFrame) -> str:
    """What the line below the figure, which names the machine, does not say."""
    first, rounds = rows.iloc[0], sorted(rows.n.unique())
    n = " to ".join(map(str, dict.fromkeys([rounds[0], rounds[-1]])))
    return f"medians, n = {n} rounds · {first.threads} threads, {first.kernel}, {first.versions} · measured, random tensors"
