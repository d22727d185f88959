"""Time to the first token of several runners: by the length of the prompt, and beside what each loses."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure, subject

_COLOURS = 10


def draw(rows: pd.DataFrame) -> Figure:
    """Seconds by tokens, quartiles as bars; and, where losses were measured, loss above the baseline at the longest prompt."""
    first = rows[rows.metric == "time_to_first_token"]
    loss, error = (rows[rows.metric == metric].set_index("method").value for metric in ("loss_increase", "loss_increase_error"))
    drawn, axes = new_figure(columns=3)
    longest = first.context_tokens.max()
    for index, (name, cell) in enumerate(first.groupby("method", sort=False)):
        marker = MARKERS[(index + index // _COLOURS) % len(MARKERS)]  # shifted where colours start anew: no two alike
        look = {"marker": marker, "color": f"C{index % _COLOURS}", "capsize": 2, "markersize": 5}
        cell = cell.sort_values("context_tokens")
        spread = [cell.value - cell.low, cell.high - cell.value]
        axes.flat[0].errorbar(cell.context_tokens, cell.value, yerr=spread, label=name, **look)
        if name in loss:
            at = cell[cell.context_tokens == longest].value.iloc[0]
            axes.flat[1].errorbar([at], [loss[name]], yerr=[error[name]], linestyle="none", **look)
    axes.flat[0].set(xlabel="tokens of the prompt", ylabel="seconds to the first token", xscale="log", yscale="log")
    ticks = sorted(first.context_tokens.unique())
    axes.flat[0].set_xticks(ticks, [str(tick) for tick in ticks])
    axes.flat[0].minorticks_off()
    axes.flat[1].set(xlabel=f"seconds to the first token, {longest} tokens", ylabel="loss above the baseline (nat)", xscale="log")
    axes.flat[2].axis("off")
    axes.flat[2].legend(*axes.flat[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="center left")
    one = first.iloc[0]
    drawn.suptitle(f"{subject(rows)}, {one.threads} threads, medians of {one.n} interleaved rounds · measured", fontsize=9)
    return drawn
