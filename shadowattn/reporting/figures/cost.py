"""What ranking the keys costs, and what is lost with the keys that it chooses."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure, subject

_COLUMNS = 3
_TICKS = (0, 8, 32, 128, 512, 2048)


def draw(rows: pd.DataFrame) -> Figure:
    """Loss above dense against multiply-accumulates × bits for each row and key, a panel a retention, a point an estimator."""
    costs = rows[rows.metric == "estimate_mac_bits"].drop_duplicates("method").set_index("method").value
    losses, errors = (
        rows[rows.metric == metric].set_index(["retention", "method"]).value
        for metric in ("loss_increase", "loss_increase_error")
    )
    retentions = sorted(rows[rows.metric == "estimate_mac_bits"].retention.unique())
    columns = min(_COLUMNS, len(retentions) + 1)  # the last panel has the legend
    drawn, axes = new_figure(columns=columns, rows=-(-(len(retentions) + 1) // columns))
    panels = list(axes.flat)
    for axis, retention in zip(panels, retentions, strict=False):
        for index, method in enumerate(costs.index):
            colour = f"C{(index + index // len(MARKERS)) % 10}"  # markers come again with other colours
            look = {"marker": MARKERS[index % len(MARKERS)], "color": colour, "label": method, "capsize": 2}
            at = (retention, method)
            axis.errorbar(costs[method], losses[at], yerr=errors[at], linestyle="none", markersize=6, **look)
        axis.set_xscale("symlog", linthresh=8, base=2)
        axis.set_xticks(_TICKS, [str(tick) for tick in _TICKS])
        positive = (losses[retention].reindex(costs.index) - errors[retention].reindex(costs.index) > 0).all()
        axis.set_yscale(**({"value": "log"} if positive else {"value": "symlog", "linthresh": 0.01}))
        axis.set_xlim(left=-2)
        axis.set(xlabel="MAC × bits for each row and key", ylabel="loss increase over dense (nat)")
        axis.set_title(f"retention {retention:g}", fontsize=9)
    for axis in panels[len(retentions) :]:
        axis.axis("off")
    alone = len(retentions) % columns == 0  # in its row
    place = panels[-columns // 2] if alone else panels[len(retentions)]
    handles = panels[0].get_legend_handles_labels()
    legend = place.legend(*handles, fontsize=8, loc="center", frameon=False, ncols=4 if alone else 1)
    legend.set_in_layout(not alone)
    drawn.suptitle(
        f"{subject(rows)}, n = {rows[rows.metric == 'loss_increase_error'].n.iloc[0]} windows of {rows.iloc[0].context_tokens} "
        "tokens, loss ± one standard error · measured; cost counted, floats as 32 bits",
        fontsize=9,
    )
    return drawn
