"""Attention of long prompts and of many heads, simulated."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    MARKERS,
    new_figure,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Latency against context and against heads; and how busy the device is in ours."""
    drawn, axes = new_figure(columns=2, rows=2)
    for column, (against, x, label) in enumerate((("context", "context_tokens", "tokens"), ("heads", "heads", "heads"))):
        case_rows = rows[(rows.data == against)]
        for index, (method, line) in enumerate(case_rows[case_rows.metric == "latency"].groupby("method", sort=False)):
            axes[0, column].plot(line[x], line.value / 1e3, marker=MARKERS[index], markersize=4, linewidth=1, label=method)
        axes[0, column].set(xscale="log", yscale="log", xlabel=label, ylabel="seconds, one layer")
        ours = case_rows[case_rows.method.str.startswith("ours")]
        for index, ((method, metric), line) in enumerate(
            ours[ours.metric != "latency"].groupby(["method", "metric"], sort=False)
        ):
            name = f"{method}: {'estimate' if metric == 'estimate_share' else 'core'}"
            axes[1, column].plot(line[x], line.value, marker=MARKERS[index], markersize=4, linewidth=1, label=name)
        axes[1, column].set(xscale="log", xlabel=label, ylabel="share of the time at work", ylim=(0, 1.05))
        for axis in axes[:, column]:
            ticks = sorted(case_rows[x].unique())[:: 1 if x == "heads" else 2]
            names = [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks]
            axis.set_xticks(ticks, names)
            axis.set_xticks([], minor=True)
    axes[0, 0].legend(fontsize=7)
    axes[1, 0].legend(fontsize=7)
    title = f"SIMULATED, {rows.device.iloc[0]}: Qwen2-1.5B against context; head dimension 128 at 32768 tokens against heads"
    caveat = f"one description, n = {(rows.metric == 'latency').sum()} times; nothing published or measured to hold it to"
    drawn.suptitle(f"{title}\n{caveat}", fontsize=9)
    return drawn
