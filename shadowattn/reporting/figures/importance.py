"""The importance of every head and layer by ablation."""

import matplotlib.colors
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import by_head, heat_map, new_figure, subject


def draw(rows: pd.DataFrame) -> Figure:
    """Loss increase for each head (left) and each layer (right) ablated; Fig. 6 of the paper for a whole model."""
    ablated = rows[(rows.metric == "loss_increase") & (rows.layer >= 0)]
    heads = ablated[ablated["head"] >= 0]
    layers = ablated[ablated["head"] < 0].sort_values("layer")
    drawn, axes = new_figure(columns=2)
    # A few heads outweigh all others by orders of magnitude. Increases below 1e-4 nat, and decreases, are shown as that.
    norm = matplotlib.colors.LogNorm(1e-4, max(1e-3, heads.value.max()))
    ablation = heads.method.iloc[0].removeprefix("ablate_")
    title = f"loss increase without the head (nat, {ablation})"
    heat_map(axes[0], by_head(heads).clip(min=1e-4), title, norm)
    axes[1].barh(layers.layer, layers.value, color="tab:blue")
    axes[1].set_xscale("symlog", linthresh=0.01)
    axes[1].set(xlabel="loss increase without the layer (nat)", ylabel="layer")
    axes[1].invert_yaxis()
    drawn.suptitle(f"{subject(rows)}, n = {heads.n.iloc[0]} tokens", fontsize=9)
    return drawn
