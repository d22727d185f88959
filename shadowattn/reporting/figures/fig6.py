"""Fig. 6 of the paper: perplexity without a head, and without a layer."""

import matplotlib
import matplotlib.ticker
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    new_figure,
    subject,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Fig. 6: perplexity with each head of the first layer ablated (a), with each layer bypassed (b), as distances from the
    perplexity of the whole model."""
    placed = rows[(rows.metric == "perplexity") & (rows.layer >= 0)]
    base = rows[(rows.metric == "perplexity") & (rows.layer < 0)].value.iloc[0]
    heads = placed[(placed.layer == 0) & (placed["head"] >= 0)].sort_values("head")
    layers = placed[placed["head"] < 0].sort_values("layer")
    drawn, axes = new_figure(columns=2)
    ablation = heads.method.iloc[0].removeprefix("ablate_")
    axes[0].vlines(heads["head"], base, heads.value, color="tab:blue", linewidth=1)
    axes[0].plot(heads["head"], heads.value, "o", color="tab:blue", markersize=4)
    axes[0].set(xlabel="head of the first layer", ylabel=f"perplexity without it ({ablation})")
    axes[1].vlines(layers.layer, base, layers.value, color="tab:blue", linewidth=1)
    axes[1].plot(layers.layer, layers.value, "o", color="tab:blue", markersize=4)
    axes[1].set(xlabel="layer", ylabel="perplexity without it", yscale="log")
    for axis in axes:
        axis.axhline(base, color="0.5", linestyle="--", label=f"nothing ablated: {base:.4g}")
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes[0].legend(fontsize=7)
    drawn.suptitle(f"{subject(rows)}, n = {heads.n.iloc[0]} tokens", fontsize=9)
    return drawn
