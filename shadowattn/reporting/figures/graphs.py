"""The bank of static graphs: what it costs, what padding it saves, and how fast each form of graph is."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import new_figure

OWN_BANK = "this run"  # in the column `method`: the bank of the run's own model
_STEPS = {"build_s": "build", "save_s": "save", "compile_s": "compile, all cores", "load_s": "load from blobs"}
_TARGETS = {"build_and_compile_s": 3.0, "load_s": 0.5, "resident_bytes": 300e6}


def draw(rows: pd.DataFrame) -> Figure:
    """Four panels: seconds, memory, padding against the number of shapes, and time of a launch by form."""
    drawn, axes = new_figure(columns=2, rows=2)
    _seconds(axes[0, 0], rows)
    _memory(axes[0, 1], rows)
    _padding(axes[1, 0], rows)
    _forms(axes[1, 1], rows)
    first = rows.iloc[0]
    drawn.suptitle(f"bank of static INT8 Q·K graphs · {first.measured} on OpenVINO's CPU device", fontsize=9)
    return drawn


def _seconds(axis, rows: pd.DataFrame) -> None:
    banks = rows[rows.metric.isin(_STEPS)]
    names = list(banks.method.unique())
    for marker, (metric, label) in zip("osDv", _STEPS.items(), strict=True):
        values = [float(banks[(banks.method == name) & (banks.metric == metric)].value.iloc[0]) for name in names]
        axis.plot(values, range(len(names)), marker, markersize=5, label=label)
    axis.set_yticks(range(len(names)), [_named(rows, name) for name in names], fontsize=7)
    axis.grid(axis="y", color="0.9")
    for metric, style in (("build_and_compile_s", "--"), ("load_s", ":")):
        axis.axvline(_TARGETS[metric], color="0.4", linestyle=style, linewidth=1)
    axis.set(xscale="log")
    axis.set_xlabel(
        f"seconds, medians of {banks.n.max()}; banks of 54 graphs:\nbuilt and compiled in 3 s (dashed) "
        f"{_met(rows, 'build_and_compile_s')},\nloaded in 0.5 s (dotted) {_met(rows, 'load_s')}",
        fontsize=7,
    )
    axis.tick_params(axis="x", which="both", labelsize=6)
    axis.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


def _memory(axis, rows: pd.DataFrame) -> None:
    banks = rows[rows.metric.isin(("resident_bytes", "buffer_bytes"))]
    names = list(banks.method.unique())
    for metric, label in (("resident_bytes", "resident after first use"), ("buffer_bytes", "of it shared")):
        values = [float(banks[(banks.method == name) & (banks.metric == metric)].value.iloc[0]) / 1e6 for name in names]
        axis.barh([_named(rows, name) for name in names], values, 0.6, label=label)
    axis.tick_params(axis="y", labelsize=7)
    axis.axvline(_TARGETS["resident_bytes"] / 1e6, color="0.4", linestyle="--", linewidth=1)
    axis.set_xlabel(f"MB; banks of 54 graphs:\nat most 300 (dashed) {_met(rows, 'resident_bytes')}", fontsize=7)
    axis.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)


def _named(rows: pd.DataFrame, name: str) -> str:
    """A bank by its model and number of graphs."""
    bank = rows[(rows.method == name) & (rows.metric == "graphs")].iloc[0]
    return f"{bank.model if name == OWN_BANK else name},\n{bank.value:.0f} graphs"


def _met(rows: pd.DataFrame, metric: str) -> str:
    """How many of the banks of 54 graphs keep a target."""
    of_54 = set(rows[(rows.metric == "graphs") & (rows.value == 54)].method)
    values = rows[(rows.metric == metric) & rows.method.isin(of_54)].value
    return f"met by {(values <= _TARGETS[metric]).sum()} of {len(values)}"


def _padding(axis, rows: pd.DataFrame) -> None:
    waste = rows[rows.metric == "waste"]
    for (policy, marker), line in zip(
        (("planned", "o"), ("multiples", "s"), ("powers", "D"), ("single", "v")), range(4), strict=True
    ):
        policy_rows = waste[waste.method == policy].sort_values("shapes")
        axis.plot(policy_rows.shapes, policy_rows.value, marker=marker, markersize=4, label=policy, zorder=5 - line)
    label = f"shapes that may be built\n(counted, n = {waste.n.max()} chunks)"
    axis.set(xlabel=label, ylabel="share of scores that is padding", ylim=(0, None))
    axis.legend(fontsize=7, loc="upper right", bbox_to_anchor=(1, 0.93))


def _forms(axis, rows: pd.DataFrame) -> None:
    forms = rows[(rows.metric == "launch_ms") & (rows.model == rows[rows.metric == "launch_ms"].model.iloc[0])]
    low, high = (
        rows[(rows.metric == name) & (rows.model == forms.model.iloc[0])].value.to_numpy() for name in ("lower_ms", "upper_ms")
    )
    values = forms.value.to_numpy()
    colours = ["0.6" if name.startswith(("torch", "OpenVINO")) else "C0" for name in forms.method]
    axis.barh(forms.method, values, color=colours, xerr=[values - low, high - values], error_kw={"linewidth": 0.8})
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=6)
    axis.set(xlabel=f"ms, medians of {forms.n.max()}:\n{forms.model.iloc[0]}, {forms.context_tokens.iloc[0]} keys")
