"""The pipeline's modes, timed."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    new_figure,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Median time of every mode with its quartiles, a panel for each number of keys, by the layer's shape."""
    times = rows[rows.metric == "time"]
    lengths, methods = sorted(times.context_tokens.unique()), list(times.method.unique())
    drawn, axes = new_figure(columns=len(lengths))
    for axis, keys in zip(np.atleast_1d(axes), lengths, strict=True):
        for index, (shape, medians) in enumerate(times[times.context_tokens == keys].groupby("model", sort=False)):
            medians = medians.set_index("method").reindex(methods)
            places = np.arange(len(methods)) + 0.2 * (index - 0.5)
            reach = [medians.value - medians.low, medians.high - medians.value]
            axis.errorbar(medians.value, places, xerr=reach, linestyle="none", marker="os"[index % 2], markersize=4, label=shape)
        axis.set_yticks(range(len(methods)), methods if keys == lengths[0] else [], fontsize=7)
        axis.grid(axis="y", color="0.9")
        axis.invert_yaxis()
        axis.set(xlabel="ms", xlim=(0, None))
        axis.set_title(f"{keys} keys", fontsize=9)
    drawn.legend(*np.atleast_1d(axes)[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    first = times.iloc[0]
    what = f"{first.chunk_rows} rows, mean retention {first.retention:g}, random tensors"
    drawn.suptitle(f"{what}\nmedians, quartiles of n = {first.n} calls · measured, kernel {first.kernel}", fontsize=8)
    return drawn
