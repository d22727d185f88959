"""The retention of every head."""

import matplotlib.colors
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import by_head, heat_map, new_figure, subject


def draw(rows: pd.DataFrame) -> Figure:
    """The retention of every head, a panel for each method and mean retention, all on one scale."""
    placed = rows[(rows.metric == "retention") & (rows["head"] >= 0)]
    maps = {key: by_head(heads) for key, heads in placed.groupby(["method", "retention"], sort=False)}
    columns = min(3, len(maps))
    drawn, axes = new_figure(columns=columns, rows=-(-len(maps) // columns))
    flat = np.atleast_1d(axes).ravel()
    for axis, ((method, retention), values) in zip(flat, maps.items(), strict=False):
        heat_map(axis, values, f"{method}, mean {retention:g}", matplotlib.colors.Normalize(0, 1))
    for axis in flat[len(maps) :]:
        axis.axis("off")
    drawn.suptitle(f"retention of every head: {subject(rows)}", fontsize=9)
    return drawn
