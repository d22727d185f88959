"""Time to the first token with blocks on an NPU, simulated, over the range of what a launch may cost."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import new_figure

_BLOCKS = "w8a8"


def draw(rows: pd.DataFrame) -> Figure:
    """A row of panels a model, a panel a platform: seconds against tokens, bands from the least to the largest launch cost."""
    blocks = _BLOCKS if _BLOCKS in set(rows.blocks) else rows.blocks.iloc[0]
    rows = rows[rows.blocks == blocks]
    models, platforms = list(dict.fromkeys(rows.model)), list(dict.fromkeys(rows.platform))
    drawn, axes = new_figure(columns=len(platforms), rows=len(models))
    axes = np.array(axes).reshape(len(models), len(platforms))
    for (model, platform), cell in rows.groupby(["model", "platform"], sort=False):
        axis = axes[models.index(model), platforms.index(platform)]
        for index, (method, part) in enumerate(cell.groupby("method", sort=False)):
            by = part.groupby("context_tokens").value
            axis.fill_between(by.min().index, by.min(), by.max(), color=f"C{index}", alpha=0.25)
            least = part[part.launch_us == part.launch_us.min()]
            axis.plot(least.context_tokens, least.value, "o-", color=f"C{index}", markersize=4, label=method)
        axis.set(xscale="log", yscale="log", title=f"{model}, NPU {platform}")
        axis.title.set_fontsize(9)
        axis.set_xlabel("tokens of the prompt", fontsize=8)
        axis.set_ylabel("s to the first token", fontsize=8)
    axes[0, 0].legend(fontsize=6)
    launch = f"{rows.launch_us.min():g} to {rows.launch_us.max():g} µs a launch"
    drawn.suptitle(f"SIMULATED from compiled graphs (blocks {blocks}), lines at the least and bands over {launch}", fontsize=9)
    return drawn
