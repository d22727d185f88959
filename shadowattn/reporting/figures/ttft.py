"""Time to the first token of several runners: by the length of the prompt, and beside what each loses."""

import re

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure, subject

_COLOURS = 10
_NUMBER = re.compile(r"_(\d+)$")  # of a runner that is one of a family: its share of the keys, or its tokens a chunk


def draw(rows: pd.DataFrame) -> Figure:
    """Seconds by tokens, quartiles as bars; and, where losses were measured, loss above the baseline at the longest prompt.

    Runners whose names differ in a number at the end alone, or in having one, look alike. Their losses are joined, and the number
    is beside them.
    """
    first = rows[rows.metric == "time_to_first_token"]
    loss, error = (rows[rows.metric == metric].set_index("method").value for metric in ("loss_increase", "loss_increase_error"))
    drawn, axes = new_figure(columns=3)
    times, losses, legend = axes.flat
    longest = first.context_tokens.max()
    families: dict[str, list[str]] = {}
    for name in first.method.unique():
        families.setdefault(_NUMBER.sub("", name), []).append(name)
    for index, (family, names) in enumerate(families.items()):
        marker = MARKERS[(index + index // _COLOURS) % len(MARKERS)]  # shifted where colours start anew: no two alike
        look = {"marker": marker, "color": f"C{index % _COLOURS}", "markersize": 4, "linewidth": 1}
        for name in names:
            cell = first[first.method == name].sort_values("context_tokens")
            spread = [cell.value - cell.low, cell.high - cell.value]
            label = {"label": _label(family, names)} if name == names[0] else {}
            times.errorbar(cell.context_tokens, cell.value, yerr=spread, capsize=2, **look, **label)
            _number(times, name, cell.context_tokens.iloc[-1], cell.value.iloc[-1], look)
        seconds = first[(first.context_tokens == longest) & first.method.isin(names)].set_index("method").value
        _draw_losses(losses, seconds[seconds.index.isin(loss.index)].sort_values(), loss, error, look)
    times.set(xlabel="tokens of the prompt", ylabel="seconds to the first token", xscale="log", yscale="log")
    ticks = sorted(first.context_tokens.unique())
    times.set_xticks(ticks, [str(tick) for tick in ticks])
    times.minorticks_off()
    losses.set(xlabel=f"seconds to the first token, {longest} tokens", ylabel="loss above the baseline (nat)", xscale="log")
    legend.axis("off")
    size = 8 if len(families) <= _COLOURS else 7
    legend.legend(*times.get_legend_handles_labels(), fontsize=size, frameon=False, loc="center left")
    one = first.iloc[0]
    drawn.suptitle(f"{subject(rows)}, {one.threads} threads, medians of {one.n} interleaved rounds · measured", fontsize=9)
    return drawn


def _label(family: str, names: list[str]) -> str:
    numbers = sorted((int(found[1]) for name in names if (found := _NUMBER.search(name))), reverse=True)
    if not numbers:
        return family
    alone = f"{family}; " if family in names else ""
    return f"{alone}{family}_{', '.join(map(str, numbers))}"


def _draw_losses(axes: Axes, seconds: pd.Series, loss: pd.Series, error: pd.Series, look: dict) -> None:
    axes.errorbar(seconds, loss[seconds.index], yerr=error[seconds.index], capsize=2, **look)
    for name, at in seconds.items():
        _number(axes, name, at, loss[name], look)


def _number(axes: Axes, name: str, x: float, y: float, look: dict) -> None:
    if found := _NUMBER.search(name):
        axes.annotate(found[1], (x, y), (4, 2), textcoords="offset points", fontsize=6, color=look["color"])
