"""The bank in pictures: what it costs, what padding it saves, and how fast each form of graph is."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.figures import new_figure

_STEPS = {"build_s": "build", "save_s": "save", "compile_s": "compile, all cores", "load_s": "load from blobs"}
_BARS = {"build_and_compile_s": 3.0, "load_s": 0.5, "resident_bytes": 300e6}


def bank(rows: pd.DataFrame) -> Figure:
    """Four panels: seconds, memory, padding against the number of shapes, and time of a launch by form."""
    drawn, axes = new_figure(columns=2, rows=2)
    _seconds(axes[0, 0], rows)
    _memory(axes[0, 1], rows)
    _padding(axes[1, 0], rows)
    _forms(axes[1, 1], rows)
    first = rows.iloc[0]
    axes[0, 0].figure.suptitle(f"bank of static INT8 Q·K graphs · {first.measured} on OpenVINO's CPU device", fontsize=9)
    return drawn


def _seconds(axis, rows: pd.DataFrame) -> None:
    banks = rows[rows.metric.isin(_STEPS)]
    names = list(banks.method.unique())
    for offset, (metric, label) in enumerate(_STEPS.items()):
        values = [float(banks[(banks.method == name) & (banks.metric == metric)].value.iloc[0]) for name in names]
        axis.barh([i + 0.2 * offset for i in range(len(names))], values, 0.18, label=label)
    axis.set_yticks([i + 0.3 for i in range(len(names))], names)
    for metric, style in (("build_and_compile_s", "--"), ("load_s", ":")):
        axis.axvline(_BARS[metric], color="0.4", linestyle=style, linewidth=1)
    axis.set(xlabel="seconds; bars for 54 graphs: 3 to build and compile, 0.5 to load", xscale="log")
    axis.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


def _memory(axis, rows: pd.DataFrame) -> None:
    banks = rows[rows.metric.isin(("resident_bytes", "buffer_bytes"))]
    names = list(banks.method.unique())
    for metric, label in (("resident_bytes", "resident after first use"), ("buffer_bytes", "of it shared")):
        values = [float(banks[(banks.method == name) & (banks.metric == metric)].value.iloc[0]) / 1e6 for name in names]
        axis.barh(names, values, 0.6, label=label)
    axis.axvline(_BARS["resident_bytes"] / 1e6, color="0.4", linestyle="--", linewidth=1)
    axis.set(xlabel="MB (dashed: the bar for 54 graphs)")
    axis.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)


def _padding(axis, rows: pd.DataFrame) -> None:
    waste = rows[rows.metric == "waste"]
    for (policy, marker), line in zip(
        (("planned", "o"), ("multiples", "s"), ("powers", "D"), ("single", "v")), range(4), strict=True
    ):
        of = waste[waste.method == policy].sort_values("shapes")
        axis.plot(of.shapes, of.value, marker=marker, markersize=4, label=policy, zorder=5 - line)
    axis.set(xlabel="shapes that may be built", ylabel="share of scores that is padding", ylim=(0, None))
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
    axis.set(xlabel=f"ms a launch: {forms.model.iloc[0]}, {forms.context_tokens.iloc[0]} keys")
