"""Where in a prompt a hidden line is found: share of questions answered, prompt length × depth, a map for each method."""

import matplotlib.colors
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import new_figure, subject

_COLUMNS = 3


def draw(rows: pd.DataFrame) -> Figure:
    """Rows of maps for each task with depths, plain or by chat template; methods at their lowest retention."""
    tasks = list(rows[["task", "chat"]].drop_duplicates().sort_values(["task", "chat"]).itertuples(index=False, name=None))
    lowest = rows.groupby("method").retention.min()
    methods = list(dict.fromkeys(rows.method))
    columns = min(len(methods), _COLUMNS)
    lines = -(-len(methods) // columns)  # of each task
    drawn, axes = new_figure(columns=columns, rows=lines * len(tasks))
    norm, image = matplotlib.colors.Normalize(0, 1), None
    for (task, chat), line in zip(tasks, np.reshape(axes, (len(tasks), lines * columns)), strict=True):
        for axis in line[len(methods) :]:
            axis.set_axis_off()
        for axis, method in zip(line, methods, strict=False):
            answered = rows[(rows.task == task) & (rows.chat == chat) & (rows.method == method)]
            answered = answered[answered.retention == lowest[method]]
            name = method if lowest[method] == 1 else f"{method}, {lowest[method]:.0%} of the keys"
            axis.set_title(f"{task}{', chat template' if chat else ''}: {name}", fontsize=9)
            if answered.empty:
                axis.set_axis_off()
                axis.text(0.5, 0.5, "not asked", ha="center", transform=axis.transAxes)
                continue
            values = answered.pivot_table(index="depth", columns="tokens", values="value")
            image = axis.imshow(values.to_numpy(), cmap="viridis", norm=norm, aspect="auto")
            for at, shares in enumerate(values.to_numpy()):
                for place, share in enumerate(shares):
                    color = "black" if share > 0.6 else "white"
                    axis.text(place, at, f"{share:.0%}", ha="center", va="center", fontsize=7, color=color)
            axis.set_xticks(range(len(values.columns)), [str(tokens) for tokens in values.columns])
            axis.set_yticks(range(len(values)), [f"{depth:.0%}" for depth in values.index])
            axis.set(xlabel="prompt, tokens", ylabel="depth of the hidden line")
    if image is not None:
        drawn.colorbar(image, ax=list(np.ravel(axes)), label="questions answered", shrink=0.8)
    n = "–".join(str(count) for count in sorted({rows.n.min(), rows.n.max()}))
    first = rows.iloc[0]
    drawn.suptitle(f"{subject(rows)}, n = {n} questions a place · {first.measured}, kernel {first.kernel}", fontsize=9)
    return drawn
