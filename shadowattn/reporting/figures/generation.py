"""Where the time of an answer goes: the engine's stages, in the prompt and for each new token."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.engine.ahead import BESIDE
from shadowattn.reporting.style import new_figure


def draw(rows: pd.DataFrame) -> Figure:
    """A bar for the prefill, in seconds, and one for a decoding step, in milliseconds, each divided by stages."""
    drawn, axes = new_figure(columns=2, rows=1)
    times = rows[(rows.metric == "time") & (rows.stage != BESIDE)]  # what passes beside the others adds nothing
    steps = max(1, int(rows.new_tokens.iloc[0]) - 1)
    for axis, phase, factor, label in (
        (axes.flat[0], "prefill", 1.0, f"prefill of {rows.prompt_tokens.iloc[0]} tokens (s)"),
        (axes.flat[1], "decode", 1e3 / steps, f"decoding, mean of {steps} tokens (ms for each token)"),
    ):
        left = 0.0
        for index, one in enumerate(times[times.phase == phase].itertuples()):
            axis.barh([0], [one.value * factor], left=left, color=f"C{index}", label=one.stage, height=0.5)
            left += one.value * factor
        axis.set(yticks=[], xlabel=label, ylim=(-0.4, 0.8))
        axis.legend(ncols=2, fontsize=8, frameon=False, loc="upper left")
    first = rows.iloc[0]
    drawn.suptitle(
        f"{first.model}, {first.method} at retention {first.retention:g}\n"
        f"blocks in {first.precision}, attention in {first.attention_dtype} · measured",
        fontsize=9,
    )
    return drawn
