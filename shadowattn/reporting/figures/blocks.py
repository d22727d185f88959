"""What the arithmetic of a decoder's blocks costs, a bar a form."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import new_figure, subject


def draw(rows: pd.DataFrame) -> Figure:
    """Loss above float32 of every form with one standard error, with dense attention and at each retention."""
    increase, error = (
        rows[rows.metric == metric].set_index(["method", "retention"]).value
        for metric in ("loss_increase", "loss_increase_error")
    )
    increase = increase[increase.index != ("float32", 1.0)]  # itself
    names = list(dict.fromkeys(increase.index.get_level_values("method")))
    retentions = sorted(increase.index.get_level_values("retention").unique(), reverse=True)
    drawn, axes = new_figure(columns=2, rows=1)
    axis = axes.flat[0]
    height = 0.8 / len(retentions)
    for index, at in enumerate(retentions):
        cells = [(place, (name, at)) for place, name in enumerate(names) if (name, at) in increase]
        axis.barh(
            [place + (index - (len(retentions) - 1) / 2) * height for place, _ in cells],
            [increase[cell] for _, cell in cells],
            xerr=[error[cell] for _, cell in cells],
            height=height,
            color=f"C{index}",
            label="dense attention" if at == 1 else f"retention {at:g}",
        )
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.axvline(0.05, color="0.5", linestyle=":", linewidth=1, label="0.05 nat")
    axis.set_xlabel("loss above float32 with dense attention (nat)")
    axes.flat[1].axis("off")
    axes.flat[1].legend(*axis.get_legend_handles_labels(), fontsize=8, frameon=False, loc="center left")
    windows = rows[rows.metric == "loss_increase_error"].n.iloc[0]
    drawn.suptitle(f"{subject(rows)}, n = {windows} windows of {rows.iloc[0].context_tokens} tokens · measured", fontsize=9)
    return drawn
