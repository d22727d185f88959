"""Figures of attention's speed, each a pure function of rows."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.online.break_even import crossing
from shadowattn.reporting.figures import new_figure, plain_ticks

_SHOWN = {
    "own dense": ("0.4", "-"),
    "attend, per row": ("tab:blue", ":"),
    "total (int8_fused), per row": ("tab:blue", "-"),
    "total (int8), per row": ("tab:green", "-"),
    "attend, 32-row blocks": ("tab:orange", ":"),
    "total (int8_fused), 32-row blocks, leading_query": ("tab:orange", "-"),
    "total (int8), 32-row blocks, leading_query": ("tab:red", "-"),
}


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """Every figure that there are rows for."""
    made = {}
    for part, x, label in (
        ("retention", "retention", "retention ({context_tokens} keys, chunk of {chunk_rows} queries)"),
        ("keys", "context_tokens", "keys (retention {retention:g}, chunk of {chunk_rows} queries)"),
    ):
        of = rows[rows.part == part]
        if len(of):
            made[f"attention_{part}"] = _speed(of, x, label.format(**of.iloc[-1]))
    if (rows.part == "chunk").any():
        made["attention_roofline"] = roofline(rows)
    return made


def break_even(retentions: np.ndarray, ratios: np.ndarray) -> float | None:
    """The retention at which a ratio falls to 1, linear between its neighbours; None where it never does."""
    return crossing(retentions, ratios) if ratios.max() >= 1 > ratios[-1] else None


def _speed(rows: pd.DataFrame, x: str, label: str) -> Figure:
    """How many times faster than torch's dense attention, a panel a shape and dtype; break-evens with our own dense marked."""
    shapes, dtypes, ticks = rows["model"].unique(), rows.dtype.unique(), sorted(rows[x].unique())
    figure, axes = new_figure(columns=len(shapes), rows=len(dtypes))
    axes = np.array(axes).reshape(len(dtypes), len(shapes))
    for column, shape in enumerate(shapes):
        for line, dtype in enumerate(dtypes):
            axis, cell = axes[line, column], rows[(rows["model"] == shape) & (rows.dtype == dtype)]
            for name, (colour, style) in _SHOWN.items():
                own = cell[(cell.method == name) & (cell.metric == "times faster than sdpa")].sort_values(x)
                if own.empty:
                    continue
                axis.plot(own[x], own.value, color=colour, linestyle=style, marker="o", markersize=3, label=name)
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
            plain_ticks(axis.xaxis)
            plain_ticks(axis.yaxis)
            axis.set_xticks(ticks, [f"{v:g}" if x == "retention" else f"{v / 1024:g}k" for v in ticks])
            axis.set_yticks([0.5, 1, 2, 4, 8, 16, 32])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.supxlabel(label + (" — dashed: break-even of the total with our own dense" if x == "retention" else ""), fontsize=9)
    figure.supylabel("times faster than torch SDPA of the same dtype", fontsize=9)
    figure.suptitle(_caption(rows), fontsize=8)
    return figure


def roofline(rows: pd.DataFrame) -> Figure:
    """Rates reached by each kernel against the products it needs for each byte of q, k, v and output, read or written once."""
    figure, axis = new_figure(columns=1)
    figure.set_size_inches(9, 4.5)
    cells = list(rows[rows.part == "chunk"].groupby(["model", "dtype"], sort=False))
    names = ["sdpa", *[name for name in _SHOWN if name.startswith(("own", "attend"))]]
    for marker, ((_, dtype), cell) in zip("osD^vP", cells, strict=False):
        for name in names:
            one = cell[(cell.method == name) & (cell.metric == "time")]
            if one.empty:
                continue
            r = one.iloc[0]
            kept = r.retention if name.startswith("attend") else 1.0
            flops = 4 * r.heads * r.chunk_rows * (r.context_tokens - r.chunk_rows / 2) * r.head_dim * kept
            size = 4 if dtype == "float32" else 2
            traffic = size * r.head_dim * (2 * r.heads * r.chunk_rows + 2 * r.kv_heads * r.context_tokens)
            colour = _SHOWN.get(name, ("black", ""))[0]
            filled = colour if dtype == "float32" else "none"
            axis.scatter(flops / traffic, flops / r.value / 1e6, marker=marker, color=colour, facecolor=filled)
    peaks = rows[rows.method == "machine"].drop_duplicates("metric").set_index("metric").value
    x = np.geomspace(10, 2000)
    for dtype, style in (("float32", "-"), ("bfloat16", "--")):
        if f"peak {dtype}" in peaks.index:
            roof = np.minimum(peaks[f"peak {dtype}"], x * peaks["bandwidth"])
            axis.plot(x, roof, color="0.5", linestyle=style, label=f"{dtype}: matrix product, memory bandwidth")
    for name in names:
        axis.scatter([], [], color=_SHOWN.get(name, ("black", ""))[0], label=name)
    for marker, ((shape, dtype), _) in zip("osD^vP", cells, strict=False):
        look = "0.5" if dtype == "float32" else "none"
        axis.scatter([], [], marker=marker, color="0.5", facecolor=look, label=f"{shape}, {dtype}")
    axis.set(xscale="log", yscale="log", xlabel="operations for each byte that must be moved", ylabel="10⁹ operations a second")
    figure.legend(loc="outside right upper", fontsize=7)
    plain_ticks(axis.xaxis)
    plain_ticks(axis.yaxis)
    axis.set_title(_caption(rows).replace(", native", "\nnative"), fontsize=8)  # two lines: the legend stands beside them
    return figure


def _caption(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    return f"{first.processor}, {first.threads} threads, {first.kernel}, {first.versions} · measured, random tensors"
