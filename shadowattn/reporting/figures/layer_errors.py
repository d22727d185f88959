"""Where in the model attention's output is off: the output error of every layer, by method and retention."""

import matplotlib.colors
import matplotlib.ticker
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import new_figure, subject

METRIC = "layer_output_error"


def draw(rows: pd.DataFrame) -> Figure:
    """A panel a retention, a line a method, a column a layer; the darker, the nearer to dense attention's output.

    Errors below 0.001 are drawn as that, those of dense layers among them, which have none.
    """
    found = rows[rows.metric == METRIC]
    retentions = sorted(found.retention.unique())
    figure, panels = new_figure(columns=len(retentions))
    norm = matplotlib.colors.LogNorm(max(found.value.min(), 1e-3), max(found.value.max(), 1e-2))
    for axis, retention in zip([panels] if len(retentions) == 1 else panels, retentions, strict=True):
        table = found[found.retention == retention].pivot_table(index="method", columns="layer", values="value", sort=False)
        image = axis.imshow(table.to_numpy().clip(norm.vmin), aspect="auto", cmap="viridis", norm=norm)
        axis.set(xlabel="layer", title=f"{retention:.0%} of the keys")
        axis.set_yticks(range(len(table)), table.index, fontsize=6)
        axis.set_xticks(range(len(table.columns)), table.columns)
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        figure.colorbar(image, ax=axis)
    figure.suptitle(f"output error of each layer, ‖output − dense‖ / ‖dense‖: {subject(found)}", fontsize=9)
    return figure
