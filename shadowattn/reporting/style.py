"""The one style of all figures: their size, markers, axes, and the line below that says where rows were measured."""

from pathlib import Path
from typing import Any

import matplotlib.axis
import matplotlib.colors
import matplotlib.image
import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MARKERS = "osDv^<>P*X"
_DPI = 150
_STRIP_INCHES = 0.16  # at the foot of a figure
# In the column `allocator`: the method attends to every key.
ALL_KEYS = "all"


def _plain_ticks(axis: matplotlib.axis.Axis) -> None:
    """Numbers of a logarithmic axis as they are written: 0.2, not 2 × 10⁻¹. At 1, 2 and 5, or on a long axis at powers of ten."""
    low, high = sorted(abs(end) for end in axis.get_view_interval())
    if axis.get_scale() == "log":
        if not (low >= 1e-5 and high < 1e6):
            return
        axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def attending_to_all(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of methods that attend to every key, in other arithmetic than dense attention: no allocator says how many."""
    return rows[rows.allocator == ALL_KEYS]


def subject(rows: pd.DataFrame) -> str:
    """What rows are about, for a title."""
    first = rows.iloc[0]
    return f"{first.model} on {first.data}"


def by_head(rows: pd.DataFrame) -> np.ndarray:
    """Values of rows that are placed, [L, H]."""
    return rows.pivot_table(index="layer", columns="head", values="value").to_numpy()


def levels(axis: Axes, rows: pd.DataFrame) -> None:
    """A dotted line across the panel for each method that has one value, whatever the retention."""
    for index, row in enumerate(rows.itertuples()):
        axis.axhline(row.value, color=str(0.2 + 0.1 * (index % 5)), linestyle=":", label=f"{row.method}, every key")


def heat_map(axis: Axes, values: np.ndarray, title: str, norm: matplotlib.colors.Normalize | None = None) -> None:
    image = axis.imshow(values, aspect="auto", cmap="viridis", norm=norm)
    axis.figure.colorbar(image, ax=axis)
    axis.set(xlabel="head", ylabel="layer", title=title)
    axis.title.set_fontsize(9)
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axis.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def new_figure(*, columns: int, rows: int = 1) -> tuple[Figure, Any]:
    """A figure and its axes: one, or an array of `rows` × `columns`, flat where there is one row or one column."""
    figure = Figure(figsize=(4.8 * columns, 3.4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns)


def save(figure: Figure, path: Path, *, below: str = "") -> Path:
    """Writes a figure as PNG, without a date, so that the same rows give the same file.

    `below` stands in small print at its foot, and as the file's Description: where its rows were measured.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), matplotlib.ticker.LogFormatter):  # and no ticks of the figure's own
            _plain_ticks(axis)
    picture = _pixels(figure)
    if below:  # a strip of its own, so that it meets no legend
        strip = Figure(figsize=(picture.shape[1] / _DPI, _STRIP_INCHES))
        strip.text(0.995, 0.2, below, ha="right", va="bottom", fontsize=6, color="0.4")
        picture = np.vstack([picture, _pixels(strip)])
    described = {"Description": below} if below else {}
    matplotlib.image.imsave(path, picture, dpi=_DPI, metadata={"Software": None} | described)
    return path


def _pixels(figure: Figure) -> np.ndarray:
    """uint8 [height, width, 4]."""
    figure.set_dpi(_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
