"""What each stage of the pipeline takes."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.online.timeline import STAGES
from shadowattn.reporting.style import (
    new_figure,
)


def draw(rows: pd.DataFrame) -> Figure:
    """Median latency of every stage against keys, p95 dotted: launches by their heads, the others by retention."""
    points = rows[rows.metric.isin(["median", "p95"])]
    drawn, axes = new_figure(columns=3)
    for axis, stage in zip(axes, STAGES, strict=True):
        by = "launch_heads" if stage == "estimate" else "retention"
        for color, (name, group) in enumerate(points[points.stage == stage].groupby(by)):
            # Buckets of one shape are the same work on a CPU: their median, and the highest p95.
            median = group[group.metric == "median"].groupby("context_tokens").value.median()
            p95 = group[group.metric == "p95"].groupby("context_tokens").value.max()
            label = f"{name} head{'s' * (name > 1)} a launch" if stage == "estimate" else f"retention {name:g}"
            axis.plot(median.index, median / 1e3, marker="o", markersize=3, color=f"C{color}", label=label)
            axis.plot(p95.index, p95 / 1e3, linestyle=":", linewidth=1, color=f"C{color}")
        axis.set(xlabel="keys", ylabel="ms (dotted: p95)", title=stage, ylim=(0, None))
        axis.legend(fontsize=7)
    first, least, most = points.iloc[0], points.n.min(), points.n.max()
    calls = f"n = {least} calls" if least == most else f"n = {least} to {most} calls"
    drawn.suptitle(
        f"{first.model}: a launch, and one head's selection and attention, alone, {calls} a point · {first.measured}, "
        f"INT8 estimate on {first.estimate_device}, kernel {first.kernel}",
        fontsize=9,
    )
    return drawn
