"""Table 8 of the paper, simulated: energy of one kernel."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    MARKERS,
    new_figure,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Table 8: simulated against published energy, hollow points fitted to; by model where nothing is published."""
    is_published = rows.published.notna().all()
    drawn, axis = new_figure(columns=1, rows=1)
    for index, (method, method_rows) in enumerate(rows.groupby("method", sort=False)):
        fitted = (method_rows.flag != "") & is_published
        look = {"linestyle": "none", "marker": MARKERS[index], "markeredgecolor": f"C{index}"}
        for part, fill, label in ((method_rows[fitted], "none", "_"), (method_rows[~fitted], f"C{index}", method)):
            axis.plot(part.published if is_published else part.model, part.value, markerfacecolor=fill, label=label, **look)
    axis.set(yscale="log", ylabel=" ".join(["simulated J", *filter(None, [] if is_published else rows.flag.unique())]))
    if is_published:
        ends = [0.8 * rows.published.min(), 1.25 * rows.published.max()]
        axis.plot(ends, ends, color="0.6", linewidth=1)
        axis.set(xscale="log", xlabel="published J", ylabel="simulated J (hollow: fitted to)")
    axis.legend(fontsize=7)
    title = f"SIMULATED, {rows.device.iloc[0]}: energy of one kernel, 1024 tokens"
    fitted = int((rows.flag != "").sum())
    counts = (
        f"\none description; powers fitted to n = {fitted} (hollow), n = {len(rows) - fitted} held out (filled)"
        if is_published
        else ""
    )
    axis.set_title(f"{title}{counts}", fontsize=8)
    return drawn
