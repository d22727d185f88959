"""Fig. 10 of the paper, simulated: latency of a layer's attention by length and method."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    MARKERS,
    new_figure,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Fig. 10: latency of one layer's attention by length and method, a panel a model."""
    latency = rows[rows.metric == "latency"]
    drawn, axes = new_figure(columns=2, rows=2)
    for axis, (model, model_rows) in zip(axes.flat, latency.groupby("model", sort=False), strict=True):
        lengths, methods = list(model_rows.context_tokens.unique()), list(model_rows.method.unique())
        for index, method in enumerate(methods):
            values = model_rows[model_rows.method == method].set_index("context_tokens").value
            axis.plot(lengths, [values[length] for length in lengths], MARKERS[index] + "-", markersize=5, label=method)
        axis.set(yscale="log", xscale="log", ylabel="ms", xlabel="tokens")
        axis.set_title(model, fontsize=9)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.set_xticks([], minor=True)
    axes.flat[0].legend(fontsize=7)
    figures = rows[rows.metric != "latency"]
    beside = [f" (published {value:g})" if value > 0 else "" for value in figures.published]
    names = figures.metric.str.replace("_", " ")
    roles = ["" if not text else ", fitted to" if flag else ", held out" for text, flag in zip(beside, figures.flag, strict=True)]
    beside = [text.replace(")", f"{role})") for text, role in zip(beside, roles, strict=True)]
    texts = [f"{name} {value:.2g}{text}" for name, value, text in zip(names, figures.value, beside, strict=True)]
    cases = figures.n[figures.metric == "mean_speedup"].iloc[0]
    where = f"{rows.device.iloc[0]}, one layer at retention {rows.retention.iloc[0]:g}"
    title = f"SIMULATED, {where}, n = {cases} cases, one description"
    drawn.suptitle(f"{title}\n{'; '.join(texts)}", fontsize=9)
    return drawn
