"""What a model finds in its prompt: the share of questions answered, by task, length and method."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, attending_to_all, new_figure, subject


def draw(rows: pd.DataFrame) -> Figure:
    """A panel for each task, plain or by chat template: dense attention against prompt length, and every method at its lowest
    retention, with 95 % intervals."""
    panels = list(rows[["task", "chat"]].drop_duplicates().sort_values(["chat", "task"]).itertuples(index=False, name=None))
    lowest = rows[rows.method != "dense"].retention.min()
    shown = rows[(rows.method == "dense") | (rows.retention == lowest) | rows.method.isin(attending_to_all(rows).method)]
    columns = min(3, len(panels))
    drawn, axes = new_figure(columns=columns, rows=-(-len(panels) // columns))
    flat = list(axes.flat) if len(panels) > 1 else [axes]
    methods = list(dict.fromkeys(shown.method))
    for axis, (task, chat) in zip(flat, panels, strict=False):
        answers = shown[(shown.task == task) & (shown.chat == chat)]
        for index, method in enumerate(methods):
            line = answers[answers.method == method].sort_values("tokens")
            if line.empty:
                continue
            places = line.tokens * (1 + 0.03 * (index - len(methods) / 2))  # beside one another
            reach = [line.value - line.low, line.high - line.value]
            look = {"color": "0.3", "linestyle": "--"} if method == "dense" else {}
            axis.errorbar(
                places,
                line.value,
                yerr=reach,
                marker=MARKERS[index % len(MARKERS)],
                markersize=4,
                capsize=2,
                label=method,
                **look,
            )
        axis.set(xlabel="prompt, tokens", ylabel="questions answered", xscale="log", ylim=(-0.05, 1.05))
        axis.set_title(f"{task}{', chat template' if chat else ''}", fontsize=9)
        ticks = sorted(rows.tokens.unique())
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
    handles = {label: handle for axis in flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), fontsize=8, loc="outside lower center", ncols=6)
    first = rows.iloc[0]
    n = "–".join(str(count) for count in sorted({rows.n.min(), rows.n.max()}))
    at = "" if lowest != lowest else f", methods at retention {lowest:g}"
    drawn.suptitle(
        f"{subject(rows)}, n = {n} questions a dot, 95 % intervals{at} · {first.measured}, kernel {first.kernel}", fontsize=9
    )
    return drawn
