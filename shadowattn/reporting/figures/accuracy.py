"""What tasks score with dense attention and with every method."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import new_figure, subject


def draw(rows: pd.DataFrame) -> Figure:
    """A panel for each task that methods were asked: mean scores with 95 % intervals, dense attention as a line."""
    asked = set(rows[rows.method != "dense"].task)  # of the others there is a line and nothing to compare
    tasks = [task for task in dict.fromkeys(rows.task) if task in asked or not asked]
    columns = min(4, len(tasks))
    drawn, axes = new_figure(columns=columns, rows=-(-len(tasks) // columns))
    flat = list(axes.flat) if len(tasks) > 1 else [axes]
    for axis in flat[len(tasks) :]:
        axis.set_axis_off()
    for axis, task in zip(flat, tasks, strict=False):
        of_task = rows[rows.task == task]
        dense = of_task[of_task.method == "dense"].iloc[0]
        axis.axhline(dense.value, color="0.3", linestyle="--", linewidth=1)
        axis.axhspan(dense.low, dense.high, color="0.3", alpha=0.12, linewidth=0)
        methods = of_task[of_task.method != "dense"]
        labels = [f"{one.method}" + (f"\n{one.retention:.0%}" if one.retention < 1 else "") for one in methods.itertuples()]
        reach = [methods.value - methods.low, methods.high - methods.value]
        axis.errorbar(range(len(methods)), methods.value, yerr=reach, fmt="o", capsize=3)
        axis.set_xticks(range(len(methods)), labels, fontsize=7, rotation=30)
        axis.set_xlim(-0.5, max(len(methods), 1) - 0.5)
        axis.set(ylabel={"rouge_l": "ROUGE-L, F1"}.get(dense.metric, "share of questions answered"))
        axis.set_title(f"{task}, n = {dense.n}, prompts up to {dense.tokens} tokens", fontsize=9)
    first = rows.iloc[0]
    drawn.suptitle(
        f"{subject(rows)}, line: dense attention, 95 % intervals · {first.measured}, kernel {first.kernel}", fontsize=9
    )
    return drawn
