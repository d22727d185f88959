"""Rates of the attention kernels beside what the machine can do."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.figures.attention_speed import SHOWN, caption
from shadowattn.reporting.style import (
    new_figure,
)

_MARKERS = "osD^vPX*"  # of a shape and dtype


def draw(rows: pd.DataFrame) -> Figure:
    """Rates reached by each kernel against the products it needs for each byte of q, k, v and output, read or written once."""
    figure, axis = new_figure(columns=1)
    figure.set_size_inches(9, 4.5)
    cells = list(rows[rows.part == "chunk"].groupby(["model", "dtype"], sort=False))
    names = ["sdpa", *[name for name in SHOWN if name.startswith(("own", "attend"))]]
    for marker, ((_, dtype), cell) in zip(_MARKERS, cells, strict=False):
        for name in names:
            one = cell[(cell.method == name) & (cell.metric == "time")]
            if one.empty:
                continue
            r = one.iloc[0]
            kept = r.retention if name.startswith("attend") else 1.0
            flops = 4 * r.heads * r.chunk_rows * (r.context_tokens - r.chunk_rows / 2) * r.head_dim * kept
            size = 4 if dtype == "float32" else 2
            traffic = size * r.head_dim * (2 * r.heads * r.chunk_rows + 2 * r.kv_heads * r.context_tokens)
            colour = SHOWN.get(name, ("black", ""))[0]
            filled = colour if dtype == "float32" else "none"
            axis.scatter(flops / traffic, flops / r.value / 1e6, marker=marker, color=colour, facecolor=filled)
    peaks = rows[rows.method == "machine"].drop_duplicates("metric").set_index("metric").value
    x = np.geomspace(10, 2000)
    for dtype, style in (("float32", "-"), ("bfloat16", "--")):
        if f"peak {dtype}" in peaks.index:
            roof = np.minimum(peaks[f"peak {dtype}"], x * peaks["bandwidth"])
            axis.plot(x, roof, color="0.5", linestyle=style, label=f"{dtype}: matrix product, memory bandwidth")
    for name in names:
        axis.scatter([], [], color=SHOWN.get(name, ("black", ""))[0], label=name)
    for marker, ((shape, dtype), _) in zip(_MARKERS, cells, strict=False):
        look = "0.5" if dtype == "float32" else "none"
        axis.scatter([], [], marker=marker, color="0.5", facecolor=look, label=f"{shape}, {dtype}")
    axis.set(xscale="log", yscale="log", xlabel="operations for each byte that must be moved", ylabel="10⁹ operations a second")
    figure.legend(loc="outside right upper", fontsize=7)
    axis.set_title(caption(rows).replace(", native", "\nnative"), fontsize=8)  # two lines: the legend stands beside them
    return figure
