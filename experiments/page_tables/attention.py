"""Time of attention on random tensors."""

import itertools
from collections.abc import Mapping

import pandas as pd

from experiments.page_tables.attention_common import (
    ESTIMATORS,
    EVEN,
    EVEN_KEYS,
    FIFTH,
    FIRST_LOOK,
    FLAT,
    LOOKED,
    PER_ROW_TARGETS,
    SPEED_AMX,
    SPEED_AMX_AT,
    TOTALS,
    WHOLE_PATHS,
    both,
    by_retention,
    even_share,
    even_share_amx,
    faster_from,
    said_least,
    said_share,
)
from experiments.page_tables.common import SHAPES, above, one, rows_of, source, table
from experiments.studies import attention_candidates as candidates
from shadowattn.reporting.attention_targets import TARGETS
from shadowattn.reporting.verdicts import gains

_QWEN = ("qwen2-0.5b", "qwen2-1.5b")
_SPEED = {
    "attend, per row": "attend, a list for every row",
    "attend, 32-row blocks": "attend, a list for 32 rows",
    "total (int8_fused), per row": "all of it, a list for every row",
    "total (hierarchical), per row": "all of it, a list for every row, after a first look",
    "total (int8_fused), 32-row blocks, leading_query": "all of it, a list for 32 rows (`leading_query`)",
    "total (int8_fused), 32-row blocks, max": "all of it, a list for 32 rows (`max`)",
    "total (int8_fused), 32-row blocks, probability": "all of it, a list for 32 rows (`probability`)",
    "total (int8_graph), per row": "the same by OpenVINO's graphs (`int8_graph`), a list for every row",
    "total (int8_graph), 32-row blocks, leading_query": "by OpenVINO's graphs, a list for 32 rows (`leading_query`)",
}


def speed() -> str:
    """Times faster than torch's and than our own dense attention."""
    rows = rows_of("attention_speed")
    rows = rows[(rows.part == "chunk") & rows.model.isin(_QWEN)]
    cases = [(model, dtype) for model in _QWEN for dtype in ("float32", "bfloat16")]

    def cell(method: str, model: str, dtype: str) -> str:
        where = {"method": method, "model": model, "dtype": dtype}
        return " · ".join(f"{one(rows, metric=f'times faster than {other}', **where):.1f}" for other in ("sdpa", "own dense"))

    lines = [[label, *(cell(method, *case) for case in cases)] for method, label in _SPEED.items()]
    lines.append(["break-even of a list for every row · after a first look", *(_even_shares(*case) for case in cases)])
    rounds = int(rows[rows.metric == "time"].n.max())
    header = ["times faster than SDPA · than our dense attention", *(f"{SHAPES[model]} {dtype}" for model, dtype in cases)]
    return table(header, lines, "attention_speed", f"medians of {rounds} rounds; {EVEN}")


def _even_shares(shape: str, dtype: str) -> str:
    """The break-even of lists for every row by each estimator, of 8192 keys."""
    return " · ".join(even_share("attention_speed", method, shape, dtype) for method in (FLAT, LOOKED))


_BY_RETENTION = {0.2: "per_row_speed_2", 0.1: "per_row_speed_1", 0.05: "per_row_speed_05"}


def per_row_speed() -> str:
    """Dense attention and the whole path where tiles multiply bfloat16: times faster than torch's and our own dense attention."""
    tables = {at: rows_of(name) for at, name in _BY_RETENTION.items()}
    lines = []
    for model, dtype in itertools.product(_QWEN, ("float32", "bfloat16")):
        for method, words in _TILE_PATHS.items():
            cells = []
            for rows in tables.values():
                where = {"part": "chunk", "method": method, "model": model, "dtype": dtype}
                baselines = ("sdpa",) if method == "own dense" else ("sdpa", "own dense")
                ratios = (one(rows, metric=f"times faster than {baseline}", **where) for baseline in baselines)
                cells.append(" · ".join(f"{ratio:.2f}" for ratio in ratios))
            where = {"part": "chunk", "method": method, "model": model, "dtype": dtype, "metric": "times faster than own dense"}
            shares = sorted(tables)
            measured = {at: one(tables[at], **where) for at in shares}
            even = "" if method == "own dense" else even_share_amx(method, model, dtype, measured)
            lines.append([SHAPES[model], dtype, words, *cells, even])
    first = tables[0.2]
    rounds = int(first[first.metric == "time"].n.max())
    header = ["", "", "times faster than SDPA · than our dense attention", *(f"{at:.0%} of the keys" for at in _BY_RETENTION)]
    header.append("break-even, of the keys")
    others = [source(name, f"{at:.0%} of the keys") for at, name in list(_BY_RETENTION.items())[1:]]
    others.append(source(SPEED_AMX, "larger shares, for break-even, but of `probability`"))
    n = f"medians of {rounds} rounds; {EVEN}, between those measured"
    return "\n\n".join([table(header, lines, _BY_RETENTION[0.2], n), *others])


_TILE_PATHS = WHOLE_PATHS | {
    f"total (int8_fused), 32-row blocks, {score}": f"a list for 32 rows (`{score}`)" for score in ("leading_query", "probability")
}


def per_row_targets() -> str:
    """Lists for every row at 8192 keys beside their targets, on random tensors and on SmolLM2's activations, and their loss."""
    name = "study_activation_speed_smollm2_avx512"
    quality = {"float32": "study_first_look_float32", "bfloat16": "study_first_look_smollm2"}
    model, lines = rows_of(name), []
    losses = {dtype: gains(rows_of(of)).set_index(["method", "rival", "retention"]) for dtype, of in quality.items()}
    for (dtype, at), target in PER_ROW_TARGETS.items():
        where, cells = {"dtype": dtype, "context_tokens": 8192}, []
        random = rows_of(FIRST_LOOK[at])
        for estimator in ESTIMATORS:
            method = f"total ({estimator}), per row"
            cells.append(one(random, method=method, metric="times faster than own dense", **where))
        for method in ("per_row", "hierarchical"):
            cells.append(one(model, method=method, retention=at, metric="times_faster_than_own_dense", **where))
        shown = [f"{value:.2f}" if value >= target else f"**{value:.2f}**" for value in cells]
        mass = {"metric": "mass_recall", "retention": at} | where
        flat, looked = (one(model, method=method, **mass) for method in ("per_row", "hierarchical"))
        loss = losses[dtype].loc["spared_10_through_1_25", "int8", at]
        of = {"metric": "break_even_keys", "dtype": dtype, "retention": at}
        even = (one(model, method=method, **of) for method in ("per_row", "hierarchical"))
        shown.append(both(said_least(keys, model.context_tokens.unique()) for keys in even))
        shown += [f"{looked / flat:.3f}", above(loss)]
        lines.append([f"{dtype}, {at:.0%} of the keys", f"≥ {target:g}", *shown])
    header = ["times faster than our dense attention", "target"]
    header += [
        f"{estimator}, {data}" for data in ("random tensors", "activations") for estimator in ("`int8_fused`", "`hierarchical`")
    ]
    sources = [source(random, f"{at:.0%} of the keys, random tensors") for at, random in list(FIRST_LOOK.items())[1:]]
    header.append("break-even of both on activations, keys")
    header.append("attention mass of `hierarchical`, of that of `int8_fused`, activations")
    header.append("loss of `hierarchical` above `int8_fused`, nat")
    sources.append(source(name, f"activations; {EVEN_KEYS}"))
    for dtype, of in quality.items():
        n = int(losses[dtype].n.iloc[0])
        sources.append(source(of, f"the loss in {dtype}, in windows of 2048 tokens, 95 % intervals, paired; n = {n}"))
    first = table(header, lines, FIRST_LOOK[0.05], "5% of the keys, random tensors; below the target in bold")
    return "\n\n".join([first, *sources])


_LEVELS = ("avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_vbmi2", "avx512_bf16")


def levels() -> str:
    """Lists for every row by the kernels of each level: times faster than our dense attention by the same kernels."""
    tables, lines = {level: rows_of(f"level_{level}") for level in _LEVELS}, []
    first = tables[_LEVELS[0]]
    shapes, dtypes = list(dict.fromkeys(first.model)), list(dict.fromkeys(first.dtype))
    for shape, dtype in itertools.product(shapes, dtypes):
        ratios = {}
        for level, rows in tables.items():
            of = rows[(rows.metric == "times faster than own dense") & (rows.model == shape) & (rows.dtype == dtype)]
            ratios[level] = [of[of.method == method].set_index("retention").value for method in TOTALS]
        time = (one(rows, metric="time", method="own dense", retention=0.2, model=shape, dtype=dtype) for rows in tables.values())
        lines.append([SHAPES[shape], dtype, "our dense attention, ms", *(f"{ms:.1f}" for ms in time)])
        for at in (0.05, 0.1, 0.2):
            cells = (" · ".join(f"{ratio[at]:.2f}" for ratio in of_level) for of_level in ratios.values())
            lines.append([SHAPES[shape], dtype, f"{at:.0%} of the keys", *cells])
        even = (" · ".join(said_share(ratio.to_dict()) for ratio in of_level) for of_level in ratios.values())
        lines.append([SHAPES[shape], dtype, "break-even, of the keys", *even])
    header = ["", "", "`int8_fused` · `hierarchical`", *(f"`{level}`" for level in _LEVELS)]
    rounds = int(first[first.metric == "time"].n.max())
    n = f"`{_LEVELS[0]}`; times faster than our dense attention by these kernels, 8192 keys, medians of {rounds} rounds; {EVEN}"
    others = [source(f"level_{level}", f"`{level}`") for level in _LEVELS[1:]]
    return "\n\n".join([table(header, lines, f"level_{_LEVELS[0]}", n), *others])


def per_row_targets_shapes() -> str:
    """The same on random tensors of other shapes, and where lists for every row stop being faster than dense attention."""
    rows = rows_of("attention_speed")
    rows = rows[(rows.part == "retention") & (rows.metric == "times faster than own dense")]
    shapes, lines = list(dict.fromkeys(rows.model)), []
    for (dtype, at), target in PER_ROW_TARGETS.items():
        cells = []
        for shape in shapes:
            values = [by_retention("attention_speed", method, shape, dtype)[at] for method in (FLAT, LOOKED)]
            cells.append(" · ".join(f"{value:.2f}" if value >= target else f"**{value:.2f}**" for value in values))
        lines.append([f"{dtype}, {at:.0%} of the keys", f"≥ {target:g}", *cells])
    for dtype in dict.fromkeys(rows.dtype):
        lines.append([f"{dtype}, break-even", "", *(_even_shares(shape, dtype) for shape in shapes)])
    header = ["`int8_fused` · `hierarchical`", "target", *(SHAPES[shape] for shape in shapes)]
    rounds = int(rows.n.min())
    n = f"8192 keys, times faster than our dense attention, medians of {rounds} rounds; below the target in bold; {EVEN}"
    return table(header, lines, "attention_speed", n)


def stages() -> str:
    """What one chunk spends its time on, per row, and the share of the machine's peak that its products reach."""
    return _stages(_QWEN)


def stages_shapes() -> str:
    """The same of other shapes."""
    return _stages(("smollm2-135m", "phonelm-1.5b"))


def _stages(models: tuple[str, ...]) -> str:
    every = rows_of("attention_speed")
    peaks = every[every.method == "machine"].set_index("metric").value
    rows = every[(every.part == "chunk") & (every.metric == "time") & every.model.isin(models)]
    cells = rows.set_index(["method", "model", "dtype"])
    cases = [(model, dtype) for model in models for dtype in ("float32", "bfloat16")]

    def cell(name: str, model: str, dtype: str) -> str:
        of = cells.loc[(name, model, dtype)]
        if name not in _PRODUCTS:
            return f"{of.value:.1f}"
        products = of.heads * of.chunk_rows * (of.context_tokens - of.chunk_rows / 2) * of.head_dim
        products *= _PRODUCTS[name] * (of.retention if name == "attend, per row" else 1)
        kind = "int8" if name == "estimate" else dtype
        return f"{of.value:.1f} · {2 * products / of.value / 1e6 / peaks[f'peak {kind}']:.0%}"

    names = ["quantise", "estimate", "select", "attend, per row"]
    names += ["total (int8_fused), per row", "total (hierarchical), per row", "own dense", "sdpa"]
    lines = [[name, *(cell(name, *case) for case in cases)] for name in names]
    times = rows.set_index(["method", "model", "dtype"]).value
    for words, parts in _BOUNDS.items():
        bounds = (times["own dense", *case] / sum(times[part, *case] for part in parts) for case in cases)
        lines.append([f"own dense / {words}", *(f"{bound:.2f}" for bound in bounds)])
    header = ["ms a chunk · of the peak", *(f"{SHAPES[model]} {dtype}" for model, dtype in cases)]
    shown = ", ".join(f"{metric} {peaks[metric]:.0f} {unit}" for metric, unit in _PEAKS.items())
    return table(header, lines, "attention_speed", f"medians of {int(rows.n.max())} rounds; {shown}")


def row_reads() -> str:
    """The rate at which lists of single rows are read, by ours and by torch, and what the target at a fifth of the keys needs."""
    rows, lines = rows_of("attention_reads"), []
    times = rows.set_index(["model", "dtype", "method"]).value
    for (model, dtype), of in rows.groupby(["model", "dtype"], sort=False):
        first, target = of.iloc[0], PER_ROW_TARGETS[dtype, 0.2]
        listed = first.heads * first.chunk_rows * (first.context_tokens - first.chunk_rows / 2) * first.retention
        values = listed * first.head_dim * {"float32": 4, "bfloat16": 2}[dtype] / 1e6  # 10⁹ bytes a second, of milliseconds
        dense, *others, attend, sums = (times[model, dtype, name] for name in _READS)
        rates = 2 * values / attend, values / sums, 2 * values / (dense / target - sum(others))
        at_torchs = dense / (sum(others) + 2 * sums)
        shown = [f"{dense:.1f}", f"{sum(others):.1f}", f"{attend:.1f}", *(f"{rate:.0f}" for rate in rates)]
        lines.append([SHAPES[model], dtype, *shown, f"{dense / (sum(others) + attend):.2f}", f"{at_torchs:.2f}", f"{target:g}"])
    header = ["", "", "our dense attention, ms", "quantise, estimate, select, ms", "attend, per row, ms"]
    header += ["keys and values that it reads, GB/s", "values that torch's sums read, GB/s", "what the target needs, GB/s"]
    header += ["times faster than our dense attention, of these parts", "the same with reads at torch's rate", "target"]
    return table(header, lines, "attention_reads", f"20% of 8192 keys, random lists, medians of {int(rows.n.min())} rounds")


_READS = ("own dense", "quantise", "estimate + select", "attend, per row", candidates.VALUE_SUMS)


# What lists for every row would gain over dense attention if all other parts took no time.
_BOUNDS = {
    "estimate": ("estimate",),
    "(quantise + estimate + select)": ("quantise", "estimate", "select"),
    "attend, per row": ("attend, per row",),
}


_PRODUCTS = {"estimate": 1, "attend, per row": 2, "own dense": 2, "sdpa": 2}  # a key and row, of D numbers each


_PEAKS = {"peak float32": "GFLOP/s", "peak bfloat16": "GFLOP/s", "peak int8": "GOP/s"}


def decode() -> str:
    """One decode step, times faster than our own dense attention."""
    return _decode("attention_speed", {})


def decode_amx() -> str:
    """The same where tiles multiply bfloat16."""
    return _decode(SPEED_AMX, {at: name for at, name in SPEED_AMX_AT.items() if at != FIFTH})


def _decode(name: str, others: Mapping[float, str]) -> str:
    """`others`: the files of other retentions, of which the steps on a shared list are shown."""
    rows = rows_of(name)
    rows = rows[rows.part == "decode"]
    lengths, cases = (8192, 32768), list(dict.fromkeys(zip(rows.model, rows.dtype, strict=True)))

    def cell(rows: pd.DataFrame, method: str, model: str, dtype: str) -> str:
        where = {"method": method, "model": model, "dtype": dtype, "metric": "times faster than own dense"}
        return " · ".join(f"{one(rows, context_tokens=keys, **where):.2f}" for keys in lengths)

    lines = [[method, *(cell(rows, method, *case) for case in cases)] for method in dict.fromkeys(rows.method)]
    for at, other in others.items():
        of = rows_of(other)
        of = of[of.part == "decode"]
        shared = (method for method in dict.fromkeys(of.method) if "shared" in method)
        lines += [[f"{method}, {at:.0%} of the keys", *(cell(of, method, *case) for case in cases)] for method in shared]
    step, every = "total (int8_fused), shared list", sorted(rows.context_tokens.unique())
    even = (faster_from(rows[rows.model == model], dtype, step, every) for model, dtype in cases)
    lines.append([f"{step}: break-even, keys", *even])
    header = ["times faster than our dense attention", *(f"{SHAPES[m]} {d}" for m, d in cases)]
    rounds = int(rows[rows.metric == "time"].n.max())
    n = f"{lengths[0]} · {lengths[1]} keys, 20% of them, medians of {rounds} rounds"
    return "\n\n".join([table(header, lines, name, n), *(source(other, f"{at:.0%} of the keys") for at, other in others.items())])


def targets() -> str:
    """The targets of attention's speed beside what was measured; missed ones in bold."""
    rows, memory = rows_of("attention_speed"), rows_of("memory_32k")
    values = pd.concat([rows[rows.part == "chunk"], memory]).set_index(["method", "metric", "model", "dtype"]).value.to_dict()
    lines = []
    for target in TARGETS:
        limits = {"float32": target.float32, "bfloat16": target.bfloat16}
        cells = []
        for model, dtype in itertools.product(_QWEN, limits):
            value, limit = values[target.method, target.metric, model, dtype], limits[dtype]
            met = limit is None or (value <= limit if target.at_most else value >= limit)
            cells.append(f"{value:.3g}" if met else f"**{value:.3g}**")
        limit = " · ".join("–" if limit is None else f"{limit:g}" for limit in limits.values())
        lines.append([target.method, target.metric, f"{'≤' if target.at_most else '≥'} {limit}", *cells])
    header = ["", "measure", "target, float32 · bfloat16"]
    header += [f"{SHAPES[model]} {dtype}" for model in _QWEN for dtype in limits]
    first = table(header, lines, "attention_speed", "missed targets in bold; shares of SDPA's time, memory in MB")
    return f"{first}\n\n{source('memory_32k', 'memory')}"
