"""What heads lose as they keep fewer keys, beside their importance."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    new_figure,
    subject,
)


def draw(rows: pd.DataFrame) -> Figure:
    """What a head is worth against how many keys it needs: a point for each head, coloured by layer.

    Loss increase without the head, and where it alone keeps the least retention that was measured; below 1e-5 nat, and
    decreases, are shown as that.
    """
    sparse = rows[rows.metric == "sensitivity_loss"]
    least = sparse.retention.min()
    place = ["layer", "head"]
    ablated = rows[(rows.metric == "loss_increase") & (rows["head"] >= 0)].set_index(place).value
    kept = sparse[sparse.retention == least].set_index(place).value.reindex(ablated.index)
    drawn, axes = new_figure(columns=1)
    colour = ablated.index.get_level_values("layer")
    points = axes.scatter(ablated.clip(lower=1e-5), kept.clip(lower=1e-5), c=colour, cmap="viridis", s=18)
    axes.figure.colorbar(points, ax=axes, label="layer")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="loss increase without the head (nat)",
        ylabel=f"loss increase at {least:.0%} of its keys (nat)",
    )
    tokens = rows[(rows.metric == "loss_increase") & (rows["head"] >= 0)].n.iloc[0]
    axes.set_title(
        f"{subject(rows)}, a point for each of {len(ablated)} heads\nn = {tokens} tokens without it, {sparse.n.iloc[0]} with "
        f"{least:.0%} of its keys",
        fontsize=8,
    )
    return drawn
