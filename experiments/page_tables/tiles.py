"""Attention where tiles multiply bfloat16 and INT8, by a processor's matrix units."""

import itertools

import pandas as pd

from experiments.page_tables.attention_common import (
    ESTIMATORS,
    EVEN,
    FIFTH,
    FLAT,
    LOOKED,
    PER_ROW_TARGETS,
    SPEED_AMX,
    SPEED_AMX_AT,
    STAGES_AMX,
    both,
    even_share_amx,
    faster_from,
    pairs_of_blocks,
    read_alone,
    read_together,
)
from experiments.page_tables.common import SHAPES, one, rows_of, source, table
from experiments.studies import attention_candidates as candidates
from shadowattn.kernels import native
from shadowattn.reporting.figures.attention_stages import PART, STAGE


def tile_targets() -> str:
    """Lists for every row beside their targets where tiles multiply bfloat16, on random tensors of all shapes."""
    rows, lines = rows_of(STAGES_AMX), []
    for (dtype, at), target in PER_ROW_TARGETS.items():
        where, cells = {"dtype": dtype, "retention": at, "metric": "times faster than own dense"}, []
        for shape in SHAPES:
            values = (one(rows, method=f"total ({estimator}), per row", model=shape, **where) for estimator in ESTIMATORS)
            cells.append(" · ".join(f"{value:.2f}" if value >= target else f"**{value:.2f}**" for value in values))
        lines.append([f"{dtype}, {at:.0%} of the keys", f"≥ {target:g}", *cells])
    faster = rows[rows.metric == "times faster than own dense"].set_index(["method", "model", "dtype", "retention"]).value
    faster = faster.sort_index()

    def even(shape: str, dtype: str) -> str:
        return both(even_share_amx(method, shape, dtype, faster[method, shape, dtype].to_dict()) for method in (FLAT, LOOKED))

    for dtype in dict.fromkeys(dtype for dtype, _ in PER_ROW_TARGETS):
        lines.append([f"{dtype}, break-even", "", *(even(shape, dtype) for shape in SHAPES)])
    header = ["`int8_fused` · `hierarchical`", "target", *SHAPES.values()]
    rounds = int(rows[rows.metric == "time"].n.min())
    n = f"8192 keys, times faster than our dense attention, medians of {rounds} rounds; below the target in bold"
    return f"{table(header, lines, STAGES_AMX, n)}\n\n{source(SPEED_AMX, f'larger shares; {EVEN}')}"


_EVEN_AMX = {
    FLAT: "each row",
    LOOKED: "each row, after a first look",
    "total (int8_fused), 32-row blocks, leading_query": "32 rows (`leading_query`)",
}


def tile_even() -> str:
    """The whole path on random tensors where tiles multiply bfloat16, at 8192 and 32768 keys; up to which share of the keys it is
    faster than dense attention, and from how many keys on.
    """
    runs = {at: rows_of(name) for at, name in SPEED_AMX_AT.items()}
    runs = {at: rows[(rows.part == "keys") & (rows.metric == "times faster than own dense")] for at, rows in runs.items()}
    longest = runs[FIFTH]
    lengths, lines = sorted(longest.context_tokens.unique()), []

    def cell(rows: pd.DataFrame, method: str, dtype: str, shape: str) -> str:
        of = rows[rows.model == shape]
        shown = [f"{one(of, context_tokens=keys, method=method, dtype=dtype):.2f}" for keys in (8192, 32768)]
        return " · ".join(shown if method == "sdpa" else [*shown, faster_from(of, dtype, method, lengths)])

    def even(method: str, dtype: str, shape: str) -> str:
        where = {"context_tokens": 8192, "method": method, "dtype": dtype, "model": shape}
        return even_share_amx(method, shape, dtype, {at: one(rows, **where) for at, rows in runs.items()})

    for dtype in dict.fromkeys(longest.dtype):
        lines.append([dtype, "SDPA", *(cell(longest, "sdpa", dtype, shape) for shape in SHAPES)])
        for at, (method, words) in itertools.product(runs, _EVEN_AMX.items()):
            lines.append([dtype, f"{words}, {at:.0%}", *(cell(runs[at], method, dtype, shape) for shape in SHAPES)])
        for method, words in _EVEN_AMX.items():
            lines.append([dtype, f"{words}: break-even, of 8192 keys", *(even(method, dtype, shape) for shape in SHAPES)])
    rounds = min(int(rows.n.min()) for rows in runs.values())
    n = (
        "times faster than our dense attention at 8192 · at 32768 keys · fewest of the measured numbers of keys from which on it "
        f"is faster, medians of {rounds} rounds or more; {EVEN}"
    )
    others = (source(SPEED_AMX_AT[at], f"{at:.0%} of the keys") for at in runs if at != FIFTH)
    return "\n\n".join([table(["", "a list for", *SHAPES.values()], lines, SPEED_AMX, n), *others])


def tile_targets_long() -> str:
    """The same of 32768 keys, where `hierarchical` has the flat path beside it: twice its speed was the target."""
    rows, lines = rows_of("attention_stages_32768_amx"), []
    faster = rows[rows.metric == "times faster than own dense"].set_index(["dtype", "retention", "model", "method"]).value
    for dtype, at in PER_ROW_TARGETS:
        cells = []
        for model in SHAPES:
            flat, looked = (faster[dtype, at, model, method] for method in (FLAT, LOOKED))
            quotient = looked / flat
            cells.append(f"{flat:.2f} · {looked:.2f} · " + (f"{quotient:.2f}" if quotient >= 2 else f"**{quotient:.2f}**"))
        lines.append([f"{dtype}, {at:.0%} of the keys", *cells])
    header = ["`int8_fused` · `hierarchical` · their quotient", *SHAPES.values()]
    n = f"32768 keys, times faster than our dense attention, medians of {int(rows[rows.metric == 'time'].n.min())} rounds; "
    n += "quotients below 2 in bold"
    return table(header, lines, "attention_stages_32768_amx", n)


def tile_stages() -> str:
    """The paths that have a target in bfloat16, where tiles multiply it: each stage as a share of our dense attention's time."""
    rows, lines, quotients = rows_of(STAGES_AMX), [], []
    rows = rows[rows.dtype == "bfloat16"]
    for model, (method, at) in itertools.product(SHAPES, ((LOOKED, 0.05), (LOOKED, 0.1), (FLAT, 0.2))):
        of = rows[(rows.model == model) & (rows.retention == at)]
        dense, path = one(of, method="own dense", metric="time"), of[of.method == method].set_index("metric").value
        shares = [path.get(STAGE + stage, 0.0) / dense for stage in candidates.STAGES]
        target = 1 / PER_ROW_TARGETS["bfloat16", at]
        quotients.append(sum(shares) * dense / path["time"])
        estimator = "`hierarchical`" if method == LOOKED else "`int8_fused`"
        cells = (f"{share:.0%}" if share else "" for share in shares)
        lines.append([SHAPES[model], f"{estimator}, {at:.0%}", f"{dense:.1f}", *cells, f"{sum(shares):.0%}", f"{target:.0%}"])
    header = ["", "of the keys", "our dense attention, ms", *candidates.STAGES, "all", "target"]
    rounds = int(rows[rows.metric == "time"].n.min())
    n = f"bfloat16, 8192 keys, shares of our dense attention's time, medians of {rounds} rounds, "
    n += f"whose sums are {min(quotients):.2f} to {max(quotients):.2f} of the times without clocks"
    return table(header, lines, STAGES_AMX, n)


def tile_roofline() -> str:
    """The share of the tiles' own peaks that stages reach, and how many times as fast as our dense attention a path would be with
    the products of these at the peak and the rest as it is: form and softmax as timed.
    """
    rows, cells = rows_of(STAGES_AMX), {}
    peaks = rows[rows.method == "machine"].set_index("metric").value
    rows = rows[rows.dtype == "bfloat16"]
    values = rows.set_index(["model", "retention", "method", "metric"]).value.sort_index()
    first = rows.iloc[0]
    for model, at in itertools.product(SHAPES, sorted(rows.retention.dropna().unique())):
        heads, dim = rows.loc[rows.model == model, ["heads", "head_dim"]].iloc[0]
        seen = first.chunk_rows * (first.context_tokens - (first.chunk_rows - 1) / 2)  # pairs of rows and keys of a head
        block = pairs_of_blocks(first, heads, at)
        dense, flat, path = (values[model, at, method] for method in ("own dense", FLAT, LOOKED))
        ms = {
            ("own dense",): (4 * heads * seen, "bfloat16", dense["time"]),
            (FLAT, "estimate"): (2 * heads * seen, "int8", flat[STAGE + "estimate"]),
            (LOOKED, "attend together"): (4 * block, "bfloat16", path[STAGE + "attend together"]),
            (LOOKED, "estimate"): (2 * block, "int8", path[STAGE + "estimate"]),
        }
        if at == FIFTH:  # with fewer keys random rows read hardly any together
            together = 4 * heads * seen * read_together(at)
            ms[FLAT, "attend together"] = (together, "bfloat16", flat[STAGE + "attend together"])
        least = {of: operations * dim / peaks[f"peak {kind} tiles"] / 1e6 for of, (operations, kind, _) in ms.items()}
        cells |= {(model, *of, at): f"{least[of] / time:.0%}" for of, (_, _, time) in ms.items()}
        products = path[STAGE + "estimate"] + path[PART + "scores"] + path[PART + "values"]
        saved = (products - least[LOOKED, "estimate"] - least[LOOKED, "attend together"]) / path["time with stages timed"]
        cells[model, LOOKED, "at the peak", at] = f"{dense['time'] / (path['time'] - saved):.2f}"
        if at == FIFTH:
            read = 4 * dim * heads * seen * read_alone(at)  # bytes: bfloat16 keys and values
            cells[model, FLAT, "reads", at] = f"{read / flat[STAGE + 'attend alone'] / 1e6:.0f}"
            products = flat[STAGE + "estimate"] + flat[PART + "scores"] + flat[PART + "values"]
            saved = (products - least[FLAT, "estimate"] - least[FLAT, "attend together"]) / flat["time with stages timed"]
            cells[model, FLAT, "at the peak", at] = f"{dense['time'] / (flat['time'] - saved):.2f}"
    lines = []
    for at in sorted({key[-1] for key in cells}):
        for of, said in _ROOFLINE.items():
            if all((model, *of, at) in cells for model in SHAPES):
                lines.append([f"{at:.0%} of the keys", said, *(cells[model, *of, at] for model in SHAPES)])
    header = ["", "bfloat16", *SHAPES.values()]
    rounds = int(rows[rows.metric == "time"].n.min())
    said = ", ".join(f"{name} {value:.0f}" for name, value in peaks.items() if "peak" in name)
    n = f"{int(first.context_tokens)} keys, medians of {rounds} rounds, peaks of the fastest; products after a first look are of "
    n += f"the keys that blocks let through, and keys read together or alone are counted as of independent rows; {said}, in 10⁹ "
    n += "operations a second"
    return table(header, lines, STAGES_AMX, n)


def tile_parts() -> str:
    """Where the time of attention of blocks goes where tiles multiply bfloat16: shares in our dense attention, and how many times
    as long a score takes after a first look.
    """
    rows, lines = rows_of(STAGES_AMX), []
    rows = rows[(rows.dtype == "bfloat16") & rows.method.isin(("own dense", LOOKED))]
    values = rows.set_index(["model", "retention", "method", "metric"]).value.sort_index()
    first = rows.iloc[0]
    for model, at in itertools.product(SHAPES, sorted(rows.retention.unique())):
        heads = rows.heads[rows.model == model].iloc[0]
        dense, looked = (values[model, at, method] for method in ("own dense", LOOKED))
        seen = heads * first.chunk_rows * (first.context_tokens - (first.chunk_rows - 1) / 2)
        dense, looked = (path[[PART + part for part in native.PARTS]] for path in (dense, looked))  # of the same calls
        more = seen / pairs_of_blocks(first, heads, at)  # scores of dense attention, over those of blocks
        longer = looked / dense * more
        cells = (f"{share:.0%} · {times:.1f}" for share, times in zip(dense / dense.sum(), longer, strict=True))
        lines.append([SHAPES[model], f"{at:.0%}", *cells, f"{looked.sum() / dense.sum() * more:.1f}"])
    header = ["bfloat16", "of the keys", *native.PARTS, "all"]
    rounds = int(rows[rows.metric == "time"].n.min())
    n = "8192 keys, shares in our dense attention · times as long for each score in blocks after a first look, of as many as by "
    n += f"calculation, hidden ones too; medians of {rounds} rounds"
    return table(header, lines, STAGES_AMX, n)


_ROOFLINE = {
    ("own dense",): "our dense attention, of the peak of bfloat16 tiles",
    (LOOKED, "attend together"): "`hierarchical`, attend together, of the peak of bfloat16 tiles",
    (LOOKED, "estimate"): "`hierarchical`, estimate, of the peak of INT8 tiles",
    (LOOKED, "at the peak"): "`hierarchical`, times faster than dense with both products at the peak",
    (FLAT, "estimate"): "`int8_fused`, estimate, of the peak of INT8 tiles",
    (FLAT, "attend together"): "`int8_fused`, attend together, of the peak of bfloat16 tiles",
    (FLAT, "reads"): "`int8_fused`, attend alone, keys and values that it reads, GB/s",
    (FLAT, "at the peak"): "`int8_fused`, times faster than dense with both products at the peak",
}
