"""What heads lose as they keep fewer keys, beside what else is measured of them: which signal predicts a head's need?"""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.need import need_and_signals
from shadowattn.reporting.style import new_figure, subject

_LEAST = 1e-5  # nat; smaller losses, and gains, are shown as that
_LABELS = {
    "ablation": "loss increase without the head, nat",
    "sensitivity_error": "change of the layer's output",
    "sensitivity_divergence": "estimated KL divergence, nat",
    "effective_keys": "effective keys: exp of the entropy",
}


def draw(rows: pd.DataFrame) -> Figure:
    """What a head needs against each signal, at the least retention that was measured: a point for each head, coloured by layer.

    Above each panel Spearman's correlation, where the rows hold it.
    """
    least = rows[(rows.metric == "sensitivity_loss")].retention.min()
    need, signals = need_and_signals(rows, least)
    ranked = rows[(rows.metric == "need_rank_correlation") & (rows.retention == least)].set_index("method").value
    drawn, axes = new_figure(columns=len(signals))
    colour = need.index.get_level_values("layer")
    panels = [axes] if len(signals) == 1 else axes
    for axis, (name, values) in zip(panels, signals.items(), strict=True):
        shown = values.clip(lower=_LEAST) if name != "sensitivity_error" else values
        points = axis.scatter(shown, need.clip(lower=_LEAST), c=colour, cmap="viridis", s=14)
        axis.set(xscale="log", yscale="log", xlabel=_LABELS[name])
        axis.set_title(f"Spearman {ranked[name]:.2f}" if name in ranked else "", fontsize=8)
    panels[-1].figure.colorbar(points, ax=panels[-1], label="layer")
    panels[0].set_ylabel(f"loss increase at {least:.0%} of its keys, nat")
    tokens = rows[rows.metric == "sensitivity_loss"].n.iloc[0]
    drawn.suptitle(
        f"{subject(rows)}: what each of {len(need)} heads needs, and what predicts it; n = {tokens} tokens of sensitivities, "
        f"{rows.measured.iloc[0]}",
        fontsize=9,
    )
    return drawn
