"""Where the time of whole sparse paths goes, stage by stage."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import new_figure

# How the metrics of stages and of their parts begin, and the one of what is in no stage: torch's operators, packing, threads that
# wait.
STAGE, PART, OUTSIDE = "stage: ", "part: ", "outside of tasks"
_COLOURS = {
    "first look": "tab:purple",
    "let through": "tab:pink",
    "estimate": "tab:blue",
    "select": "tab:orange",
    "attend together": "tab:green",
    "attend alone": "tab:olive",
    "spared heads": "tab:red",
    OUTSIDE: "0.7",
}
_CALLED = {
    "total (int8_fused), per row": "per row",
    "total (hierarchical), per row": "first look",
    "per_row": "per row",
    "hierarchical": "first look",
}
_DENSE = ("own dense", "own_dense")


def draw(rows: pd.DataFrame) -> Figure:
    """Stacked times of the stages of each path, a bar a path and retention; our dense attention is a line.

    A panel a dtype and shape, or where all rows are of one model, a dtype and number of keys.
    """
    stages, dense = rows[rows.metric.str.startswith(STAGE)], rows[rows.method.isin(_DENSE) & (rows.metric == "time")]
    by = "model" if stages.model.nunique() > 1 else "context_tokens"
    dtypes, columns, retentions = stages.dtype.unique(), stages[by].unique(), sorted(stages.retention.unique())
    figure, axes = new_figure(columns=len(columns), rows=len(dtypes))
    axes = np.array(axes).reshape(len(dtypes), len(columns))
    paths = list(stages.method.unique())
    bars = [(path, at) for path in paths for at in retentions]
    places = np.arange(len(bars)) + np.repeat(np.arange(len(paths)), len(retentions))  # a gap between paths
    for line, dtype in enumerate(dtypes):
        for column, value in enumerate(columns):
            axis, cell = axes[line, column], stages[(stages[by] == value) & (stages.dtype == dtype)]
            values, bottom = cell.set_index(["method", "retention", "metric"]).value, np.zeros(len(bars))
            for stage, colour in _COLOURS.items():
                heights = np.array([values.get((path, at, STAGE + stage), 0.0) for path, at in bars])
                axis.bar(places, heights, bottom=bottom, color=colour, label=stage, width=0.85)
                bottom += heights
            level = dense[(dense[by] == value) & (dense.dtype == dtype)].value.median()
            axis.axhline(level, color="0.3", linestyle="--", label="our dense attention")
            axis.set_xticks(places, [f"{100 * at:g}%" for _, at in bars], fontsize=6)
            for path, of_path in zip(paths, np.split(places, len(paths)), strict=True):
                look = {"ha": "center", "va": "top", "fontsize": 7, "transform": axis.get_xaxis_transform()}
                axis.text(of_path.mean(), -0.12, _called(path), **look)
            axis.set_title(f"{value}, {dtype}" if by == "model" else f"{value} keys, {dtype}", fontsize=9)
            axis.set_ylabel("" if column else "ms")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.supxlabel("retention, by path", fontsize=9)
    first = stages.iloc[0]
    keys = f"{first.context_tokens} keys, " if by == "model" else ""
    subject = f"{first.model} on {first.data}" if first.data != "random tensors" else first.data
    said = [
        f"{subject}, {keys}chunk of {first.chunk_rows} queries",
        f"stages timed in the kernels, over {first.threads} threads",
        f"medians, n = {first.n} rounds · {first.kernel} · {first.measured}",
    ]
    figure.suptitle(("\n" if len(columns) == 1 else " · ").join(said), fontsize=8)
    return figure


def _called(path: str) -> str:
    """What a path is called below its bars: `shared_32` and `total (int8_fused), 32-row blocks, probability` are 32 rows."""
    if path in _CALLED:
        return _CALLED[path]
    rows = path.removeprefix("shared_") if path.startswith("shared_") else path.split(", ")[1].split("-")[0]
    return f"{rows} rows"
