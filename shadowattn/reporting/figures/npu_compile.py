"""What Intel's NPU compiler predicts of our graphs: forms, tile shapes, blocks and attention, by platform."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, new_figure

_FORMS = {
    "static": "float32 in and out (static)",
    "unit, int8 inputs": "int8 in, float32 out (unit)",
    "int8, float16 scores": "int8 in, float16 out (int8)",
    "int8, mask": "int8, mask",
    "int8, mask, TopK 205": "int8, mask, TopK (not all priced)",
}
_BLOCKS = ("float16", "w8", "w4", "w8a8", "w8a8, weights as inputs")


def draw(rows: pd.DataFrame) -> Figure:
    """Four panels: forms of the estimate; share of the INT8 peak by launch size; blocks; estimate against dense attention."""
    drawn, axes = new_figure(columns=2, rows=2)
    _forms(axes[0, 0], rows)
    _sizes(axes[0, 1], rows)
    _blocks(axes[1, 0], rows)
    _attention(axes[1, 1], rows)
    for axis in axes.flat:
        _say_where_nothing_compiled(axis)
    drawn.suptitle("COMPILED, not run · predicted by the cost model of Intel's NPU compiler, without launch cost", fontsize=9)
    return drawn


def _say_where_nothing_compiled(axis) -> None:
    """In place of an empty panel, which has no place on a logarithmic axis."""
    points = [np.asarray(line.get_data(), dtype=float) for line in axis.lines]
    if not any(np.isfinite(at).all(0).any() for at in points):
        label = axis.get_xlabel()
        axis.clear()
        axis.set(xticks=(), yticks=())
        axis.set_xlabel(label, fontsize=7)
        axis.text(0.5, 0.5, "none of these graphs compiled", ha="center", transform=axis.transAxes, fontsize=8)


def _platforms(rows: pd.DataFrame) -> list[tuple[str, str]]:
    return list(zip(dict.fromkeys(rows.platform), MARKERS, strict=False))


def _model(rows: pd.DataFrame) -> str:
    """The one that two panels are about."""
    models = [name for name in dict.fromkeys(rows.model) if name != "none"]
    return "qwen2_0_5b" if "qwen2_0_5b" in models else models[0]


def _forms(axis, rows: pd.DataFrame) -> None:
    forms = rows[(rows.part == "form") & rows.method.isin(_FORMS)]
    names = [name for name in _FORMS if name in set(forms.method)]
    for platform, marker in _platforms(rows):
        values = forms[forms.platform == platform].set_index("method").value
        axis.plot([values.get(name) for name in names], range(len(names)), marker, markersize=5, label=f"NPU {platform}")
    axis.set_yticks(range(len(names)), [_FORMS[name] for name in names], fontsize=7)
    axis.grid(axis="y", color="0.9")
    axis.set(xlim=(0, None))
    axis.set_title("Forms of the estimate", fontsize=8)
    axis.set_xlabel("predicted µs of 4 heads × 128 rows × 1024 keys × 64", fontsize=7)
    axis.legend(fontsize=6)


def _sizes(axis, rows: pd.DataFrame) -> None:
    sizes = rows[rows.part.isin(("rows", "keys", "heads")) | ((rows.part == "layout") & (rows.method == "int8 in, float16 out"))]
    known = sizes[sizes.peak_share.notna()]
    for platform, marker in _platforms(known):
        cell = known[known.platform == platform].sort_values("macs")
        axis.plot(cell.macs / 1e6, 100 * cell.peak_share, marker, markersize=5, label=f"NPU {platform}")
    axis.set(xscale="log", ylim=(0, None))
    unknown = sorted(set(sizes.platform) - set(known.platform))
    of = f"; the peak of {', '.join(map(str, unknown))} is not known" if unknown else ""
    axis.set_title(f"Launches of other rows, keys and heads{of}", fontsize=8)
    if len(known):
        axis.legend(fontsize=6)
    axis.set_xlabel("10⁶ multiply-accumulates of a launch, D 64", fontsize=7)
    axis.set_ylabel("% of the published INT8 peak", fontsize=7)


def _blocks(axis, rows: pd.DataFrame) -> None:
    model = _model(rows)
    blocks = rows[rows.part.str.startswith("block") & (rows.model == model)]
    names = [name for name in _BLOCKS if name in set(blocks.method)]
    for platform, marker in _platforms(rows):
        cell = blocks[blocks.platform == platform].groupby("method").value.sum(min_count=2)
        axis.plot([cell.get(name) for name in names], range(len(names)), marker, markersize=5, label=f"NPU {platform}")
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.grid(axis="y", color="0.9")
    axis.set(xscale="log")
    axis.set_title("Decoder blocks; RMS normalisation is not priced", fontsize=8)
    axis.set_xlabel(f"predicted µs of one layer's blocks, {model}, one chunk", fontsize=7)


def _attention(axis, rows: pd.DataFrame) -> None:
    model = _model(rows)
    whole = rows[(rows.model == model) & rows.part.isin(("bank", "attention"))]
    whole = whole[whole.heads == whole.heads.max()]
    for index, (platform, marker) in enumerate(_platforms(rows)):
        for (part, method), line in ((("attention", "float16"), "-"), (("bank", "int8"), "--")):
            cell = whole[(whole.platform == platform) & (whole.part == part) & (whole.method == method)]
            label = f"NPU {platform}: {'dense attention, FP16' if part == 'attention' else 'estimate'}"
            axis.plot(cell.context_tokens, cell.value, marker + line, color=f"C{index}", markersize=4, linewidth=1, label=label)
    axis.set(xscale="log", yscale="log")
    axis.set_title("Estimate and dense attention", fontsize=8)
    axis.set_xlabel(f"keys; all heads of a layer of {model}, one chunk", fontsize=7)
    axis.set_ylabel("predicted µs", fontsize=7)
    axis.legend(fontsize=5, loc="upper left", handlelength=4, bbox_to_anchor=(1, 1))
