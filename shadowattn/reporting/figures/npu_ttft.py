"""Time to the first token with blocks on an NPU, simulated, over the range of what a launch may cost."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import new_figure

_BLOCKS = "w8a8"


def draw(rows: pd.DataFrame) -> Figure:
    """A row of panels a model, a panel a platform: seconds by tokens, solid at the least launch cost, dashed at the most."""
    blocks = _BLOCKS if _BLOCKS in set(rows.blocks) else rows.blocks.iloc[0]
    rows = rows[rows.blocks == blocks]
    models, platforms = list(dict.fromkeys(rows.model)), list(dict.fromkeys(rows.platform))
    drawn, axes = new_figure(columns=len(platforms), rows=len(models))
    axes = np.array(axes).reshape(len(models), len(platforms))
    limits = {model: (0.8 * cell.value.min(), 1.25 * cell.value.max()) for model, cell in rows.groupby("model")}
    for (model, platform), cell in rows.groupby(["model", "platform"], sort=False):
        axis = axes[models.index(model), platforms.index(platform)]
        for index, (method, part) in enumerate(cell.groupby("method", sort=False)):
            for cost, line, label in ((part.launch_us.min(), "o-", method), (part.launch_us.max(), "o--", "_")):
                at = part[part.launch_us == cost]
                axis.plot(at.context_tokens, at.value, line, color=f"C{index}", markersize=3, linewidth=1, label=label)
        axis.set(xscale="log", yscale="log", ylim=limits[model], title=f"{model}, NPU {platform}")
        axis.title.set_fontsize(9)
        axis.set_xlabel("tokens of the prompt", fontsize=8)
        axis.set_ylabel("s to the first token", fontsize=8)
    drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
    least, most = rows.launch_us.min(), rows.launch_us.max()
    said = f"solid: {least:g} µs a launch, dashed: {most:g} µs"
    drawn.suptitle(f"SIMULATED from compiled graphs, blocks {blocks} · {said}", fontsize=9)
    return drawn
