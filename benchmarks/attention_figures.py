"""Figures of the attention benchmark: pure functions of its rows."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen needed
import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np
import pandas as pd

from shadowattn.online.break_even import crossing

_SHOWN = {
    "own dense": ("0.4", "-"),
    "attend, per row": ("tab:blue", ":"),
    "total (int8_fused), per row": ("tab:blue", "-"),
    "total (int8), per row": ("tab:green", "-"),
    "attend, 32-row blocks": ("tab:orange", ":"),
    "total (int8_fused), 32-row blocks, leading_query": ("tab:orange", "-"),
    "total (int8), 32-row blocks, leading_query": ("tab:red", "-"),
}


def draw(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """Every figure that there are rows for."""
    made = []
    for part, x, label in (
        ("keys", "keys", "keys (retention 0.2, chunk of 512 queries)"),
        ("retention", "retention", "retention (8192 keys, chunk of 512 queries)"),
    ):
        if (rows.part == part).any():
            made.append(_speed(rows[rows.part == part], x, label, folder / f"attention_{part}.png"))
    if (rows.part == "bars").any():
        made.append(roofline(rows[rows.part == "bars"], folder / "attention_roofline.png"))
    return made


def break_even(retentions: np.ndarray, ratios: np.ndarray) -> float | None:
    """The retention at which a ratio falls to 1, linear between its neighbours; None where it never does."""
    return crossing(retentions, ratios) if ratios.max() >= 1 > ratios[-1] else None


def _speed(rows: pd.DataFrame, x: str, label: str, path: Path) -> Path:
    """How many times faster than torch's dense attention, a panel a shape and dtype; break-evens with our own dense marked."""
    shapes, dtypes = rows["model"].unique(), rows.dtype.unique()
    figure, axes = plt.subplots(
        len(dtypes), len(shapes), figsize=(4.2 * len(shapes), 3.4 * len(dtypes)), squeeze=False, sharex=True, layout="constrained"
    )
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
                    above = axis.get_xaxis_transform()  # x in data, y from 0 at the bottom to 1 at the top of the panel
                    axis.text(even, 0.98, f"{even:.2f} ", color=colour, fontsize=7, ha="right", va="top", transform=above)
            axis.axhline(1, color="0.7", linewidth=0.8)
            axis.set_title(f"{shape}, {dtype}", fontsize=9)
            axis.set(xscale="log", yscale="log")
            for part in (axis.xaxis, axis.yaxis):
                part.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
                part.set_minor_formatter(matplotlib.ticker.NullFormatter())
            axis.set_xticks(
                sorted(rows[x].unique()), [f"{v / 1024:g}k" if x == "keys" else f"{v:g}" for v in sorted(rows[x].unique())]
            )
            axis.set_yticks([0.5, 1, 2, 4, 8, 16, 32])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.supxlabel(label + (" — dashed: break-even of the total with our own dense" if x == "retention" else ""), fontsize=9)
    figure.supylabel("times faster than torch SDPA of the same dtype", fontsize=9)
    figure.suptitle(_caption(rows), fontsize=9)
    return _save(figure, path)


def roofline(rows: pd.DataFrame, path: Path) -> Path:
    """Rates reached by each kernel against the products it needs for each byte of q, k, v and output, read or written once."""
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    names = ["sdpa", *[name for name in _SHOWN if name.startswith(("own", "attend"))]]
    for marker, ((_, dtype), cell) in zip("osD^vP", rows.groupby(["model", "dtype"], sort=False), strict=False):
        for name in names:
            one = cell[(cell.method == name) & (cell.metric == "time")]
            if one.empty:
                continue
            r = one.iloc[0]
            kept = r.retention if name.startswith("attend") else 1.0
            flops = 4 * r.heads * r.rows * (r["keys"] - r.rows / 2) * r.head_dim * kept
            size = 4 if dtype == "float32" else 2
            traffic = size * r.head_dim * (2 * r.heads * r.rows + 2 * r.kv_heads * r["keys"])
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
    for marker, ((shape, dtype), _) in zip("osD^vP", rows.groupby(["model", "dtype"], sort=False), strict=False):
        look = "0.5" if dtype == "float32" else "none"
        axis.scatter([], [], marker=marker, color="0.5", facecolor=look, label=f"{shape}, {dtype}")
    axis.set(xscale="log", yscale="log", xlabel="operations for each byte that must be moved", ylabel="10⁹ operations a second")
    figure.legend(loc="outside right upper", fontsize=7)
    axis.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axis.set_yticks([100, 200, 400, 800])
    axis.set_title(_caption(rows).replace(", native", "\nnative"), fontsize=8)  # two lines: the legend stands beside them
    return _save(figure, path)


def _caption(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    return f"{first.processor}, {first.threads} threads, {first.kernel}, {first.versions} · measured, random tensors"


def _save(figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path
