"""What Intel's NPU compiler makes of the graphs, and times that follow from it."""

import pandas as pd

from experiments.page_tables.common import rows_of, table

_COMPILED = "npu_compile"
_FORMS = (
    "static",
    "static, INT8 scores",
    "runtime scales",
    "unit, int8 inputs",
    "int8, float16 scores",
    "int8, INT8 scores",
    "int8, mask",
    "int8, mask, TopK 205",
    "int8, mask, pool 1×16, TopK 13",
)
_BUCKETS = 9


def npu_compiles() -> str:
    """How many graphs compile, by what they are examples of, and the kinds of operations that are not priced."""
    rows = rows_of(_COMPILED)
    platforms = _platforms(rows)
    lines = []
    for part, cell in rows.groupby("part", sort=False):
        of = [cell[cell.platform == platform] for platform in platforms]
        counts = [f"{one.value.notna().sum()} of {len(one)}" for one in of]
        kinds = sorted({kind for unpriced in cell.unpriced for kind in str(unpriced).split(", ") if kind and kind != "nan"})
        lines.append([part, *counts, ", ".join(kinds) or "–"])
    return table(
        ["graphs that compile", *map(_named, platforms), "not priced"],
        lines,
        _COMPILED,
        "not priced: the compiler's names of kernels",
    )


def npu_forms() -> str:
    """Predicted microseconds of one launch by form and platform."""
    rows = rows_of(_COMPILED)
    return _by_method(rows[(rows.part == "form") & rows.method.isin(_FORMS)], "form, 4 heads × 128 rows × 1024 keys × D 64")


def npu_layouts() -> str:
    """The same of other layouts and arithmetic."""
    rows = rows_of(_COMPILED)
    return _by_method(rows[rows.part == "layout"], "layout, the same product")


def npu_sizes() -> str:
    """Predicted microseconds of the form int8 by the size of a launch."""
    rows = rows_of(_COMPILED)
    rows = rows[rows.part.isin(("rows", "keys", "heads", "heads folded", "head dimension"))]
    names = [
        f"{r.heads} heads{' of one key head' if r.group > 1 else ''} × {r.chunk_rows} × {r.context_tokens}, D {r.head_dim}"
        for r in rows.itertuples()
    ]
    return _by_method(rows.assign(method=names), "launch of the form int8")


def npu_tiles() -> str:
    """Predicted microseconds by how many tiles of the matrix engine a graph may use."""
    rows = rows_of(_COMPILED)
    rows = rows[rows.part == "tiles"]
    names = [f"{row.chunk_rows} rows, {row.tiles} tiles" for row in rows.itertuples()]
    return _by_method(rows.assign(method=names), "4 heads × rows × 4096 keys × D 64")


def npu_occupancy() -> str:
    """How much a tile of the matrix engine does in a cycle of the predicted time, by size and number of tiles."""
    rows = rows_of(_COMPILED)
    rows = rows[rows.part.isin(("tiles", "rows", "heads"))]
    per_cycle = rows.macs / (rows.value * rows.dpu_mhz * rows.dpu_tiles)
    names = [
        f"{r.heads} heads × {r.chunk_rows} × {r.context_tokens}{f', at most {r.tiles} tiles' if r.tiles else ''}"
        for r in rows.itertuples()
    ]
    lines = []
    for name, cell in rows.assign(method=names, per_cycle=per_cycle).groupby("method", sort=False):
        by = cell.set_index("platform")
        of = [by.loc[platform] for platform in _platforms(rows)]
        lines.append([name, *(f"{one.per_cycle:.0f} × {one.dpu_tiles:.0f}" if one.value == one.value else "fails" for one in of)])
    note = "multiply-accumulates of a tile in a cycle × tiles that the graph uses; of products alone"
    return table(["launch of the form int8, D 64", *map(_named, _platforms(rows))], lines, _COMPILED, note)


def npu_selection() -> str:
    """Scores, indices of the chosen keys, and dense attention, of all heads of a layer, at the most keys."""
    rows = rows_of(_COMPILED)
    rows = rows[rows.part.isin(("bank", "attention"))]
    lines = []
    for model in rows.model[rows.part == "attention"].unique():
        of = rows[(rows.model == model) & (rows.heads == rows.heads[rows.model == model].max())]
        of = of[of.context_tokens == of.context_tokens[of.part == "attention"].max()]
        for method, name in (("int8", "scores"), ("int8, mask, TopK 20 %", "indices of a fifth"), ("float16", "dense attention")):
            by = of[of.method == method].set_index("platform").value
            keys = int(of.context_tokens.iloc[0])
            lines.append([model, f"{name}, {keys} keys", *(f"{by[platform]:.0f}" for platform in _platforms(rows))])
    header = ["model", "all heads of a layer, 256 rows", *(f"{_named(platform)}, µs" for platform in _platforms(rows))]
    return table(header, lines, _COMPILED, "indices: a lower bound; without launch cost")


def npu_bank() -> str:
    """Number and size of graphs of a bank of nine buckets."""
    rows = rows_of(_COMPILED)
    rows, lines = rows[rows.part == "bank"], []
    for (model, form), cell in rows.groupby(["model", "method"], sort=False):
        times = _BUCKETS if form == "static" else 1
        of = [cell[cell.platform == platform].blob_bytes for platform in _platforms(rows)]
        sizes = [f"{times * one.sum() / 1e6:.1f} MB" if one.notna().all() else "–" for one in of]
        lines.append([model, form, str(times * len(of[0])), *sizes])
    header = ["model", "form", "graphs", *map(_named, _platforms(rows))]
    return table(header, lines, _COMPILED, f"{_BUCKETS} buckets where scales are built in; a dash where a graph does not compile")


def npu_blocks() -> str:
    """Predicted microseconds of one layer's blocks."""
    rows = rows_of(_COMPILED)
    rows = rows[rows.part.str.startswith("block")]
    lines = []
    for (model, form), cell in rows.groupby(["model", "method"], sort=False):
        by = [cell[cell.platform == platform] for platform in _platforms(rows)]
        shown = [f"{one.value.sum():.0f}" if one.value.notna().all() else "–" for one in by]
        known = cell.fp_ops.notna().any()
        lines.append([model, form, *shown, ("floating point" if cell.fp_ops.sum() > 0 else "INT8") if known else "not known"])
    chunk = int(rows.chunk_rows.iloc[0])
    header = ["model", "blocks", *(f"{_named(platform)}, µs" for platform in _platforms(rows)), "products (not known of 3720)"]
    return table(header, lines, _COMPILED, f"one layer, both blocks, {chunk} rows; lower bounds: RMS normalisation is not priced")


def npu_ttft() -> str:
    """Simulated seconds to the first token, over the range of launch costs."""
    rows = rows_of("npu_ttft")
    rows = rows[rows.blocks == "w8a8"]
    methods = list(dict.fromkeys(rows.method))
    lines = []
    for (model, platform, tokens), cell in rows.groupby(["model", "platform", "context_tokens"], sort=False):
        if tokens not in (rows.context_tokens.min(), rows.context_tokens.max()):
            continue
        by = [cell[cell.method == method].value for method in methods]
        share = cell[(cell.method == methods[0])].cpu_share
        shown = [f"{one.min():.2f} … {one.max():.2f}" for one in by]
        lines.append([model, platform, str(tokens), *shown, f"{share.min():.0%} … {share.max():.0%}"])
    header = ["model", "NPU", "tokens", *(f"{name}, s" for name in methods), "share of the CPU, ours"]
    launch = f"{rows.launch_us.min():g} to {rows.launch_us.max():g} µs a launch, assumed"
    return table(header, lines, "npu_ttft", f"blocks w8a8, {launch}; simulated from compiled graphs")


def _by_method(rows: pd.DataFrame, title: str) -> str:
    platforms = _platforms(rows)
    lines = []
    for name, cell in rows.groupby("method", sort=False):
        by = cell.set_index("platform")
        lines.append([name, *(_cell(by.loc[platform]) for platform in platforms)])
    note = "share: of the published INT8 peak; * not all operations are priced"
    return table([title, *(f"{_named(platform)}, µs (share)" for platform in platforms)], lines, _COMPILED, note)


def _cell(row: pd.Series) -> str:
    if row.value != row.value:
        return "fails"
    share = "" if row.peak_share != row.peak_share else f" ({row.peak_share:.0%})"
    return f"{row.value:.1f}{share}{' *' if isinstance(row.unpriced, str) and row.unpriced else ''}"


def _platforms(rows: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(rows.platform))


def _named(platform: object) -> str:
    return f"NPU {platform}"
