"""Time and memory of attention."""

import itertools
import math
from collections.abc import Iterable, Mapping

import pandas as pd

from experiments.page_tables.common import SHAPES, above, one, rows_of, source, table
from experiments.studies import attention_candidates as candidates
from experiments.studies.estimator_speed import break_even_keys, said_break_even
from shadowattn.kernels import native
from shadowattn.online.break_even import crossing
from shadowattn.reporting.attention_targets import TARGETS
from shadowattn.reporting.figures.attention_stages import PART, STAGE
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
    return table(header, lines, "attention_speed", f"medians of {rounds} rounds; {_EVEN}")


_EVEN_KEYS = "break-even: the fewest of the measured numbers of keys from which on it is faster"
_EVEN = "break-even: share of the keys above which dense attention is faster"
_ESTIMATORS = ("int8_fused", "hierarchical")
_LOOKED, _FLAT = "total (hierarchical), per row", "total (int8_fused), per row"
_TOTALS = tuple(f"total ({estimator}), per row" for estimator in _ESTIMATORS)


def _even_shares(shape: str, dtype: str) -> str:
    """The break-even of lists for every row by each estimator, of 8192 keys."""
    ratios = (_by_retention(estimator, shape, dtype) for estimator in _ESTIMATORS)
    return " · ".join(f"{crossing(list(ratio.index), list(ratio)):.0%}" for ratio in ratios)


def _by_retention(estimator: str, shape: str, dtype: str) -> pd.Series:
    """Times faster than our dense attention, by retention."""
    rows = rows_of("attention_speed")
    rows = rows[(rows.part == "retention") & (rows.metric == "times faster than own dense")]
    of = (rows.method == f"total ({estimator}), per row") & (rows.dtype == dtype) & (rows.model == shape)
    return rows[of].set_index("retention").value


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
            even = "" if method == "own dense" else _share({at: one(tables[at], **where) for at in shares})
            lines.append([SHAPES[model], dtype, words, *cells, even])
    first = tables[0.2]
    rounds = int(first[first.metric == "time"].n.max())
    header = ["", "", "times faster than SDPA · than our dense attention", *(f"{at:.0%} of the keys" for at in _BY_RETENTION)]
    header.append("break-even, of the keys")
    others = [source(name, f"{at:.0%} of the keys") for at, name in list(_BY_RETENTION.items())[1:]]
    n = f"medians of {rounds} rounds; {_EVEN}, between those measured"
    return "\n\n".join([table(header, lines, _BY_RETENTION[0.2], n), *others])


def _share(ratios: dict[float, float]) -> str:
    """Up to which share of the keys lists are faster than dense attention, between those measured."""
    shares = sorted(ratios)
    if ratios[shares[0]] < 1 or ratios[shares[-1]] >= 1:
        return f"below {shares[0]:.0%}" if ratios[shares[0]] < 1 else f"above {shares[-1]:.0%}"
    return f"{crossing(shares, [ratios[at] for at in shares]):.0%}"


def activation_speed_smollm2_avx512() -> str:
    """The whole path on SmolLM2's own queries, keys and values."""
    return _activation_speed("study_activation_speed_smollm2_avx512")


def first_look_speed() -> str:
    """Chunks of many keys with a list for every row, with and without a first look: times and how many times faster."""
    tables = {at: rows_of(name) for at, name in _FIRST_LOOK.items()}
    lengths = sorted(tables[0.05].context_tokens.unique())
    lines = []
    for at, rows in tables.items():
        for dtype in ("float32", "bfloat16"):
            for method, words in _WHOLE_PATHS.items():
                cells = []
                for keys in lengths:
                    where = {"dtype": dtype, "method": method, "context_tokens": keys}
                    time = f"{one(rows, metric='time', **where):.1f}"
                    ratio = "" if method == "own dense" else f" · {one(rows, metric='times faster than own dense', **where):.2f}"
                    cells.append(time + ratio)
                cells.append("" if method == "own dense" else _faster_from(rows, dtype, method, lengths))
                lines.append([f"{at:.0%}", dtype, words, *cells])
    header = ["of the keys", "", "milliseconds · times faster than our dense attention", *(f"{keys} keys" for keys in lengths)]
    header.append("break-even, keys")
    first = tables[0.05]
    rounds = int(first[first.metric == "time"].n.min())
    n = f"medians of {rounds} rounds or more; {_EVEN_KEYS}"
    others = [source(name, f"{at:.0%} of the keys") for at, name in list(_FIRST_LOOK.items())[1:]]
    return "\n\n".join([table(header, lines, _FIRST_LOOK[0.05], n), *others])


def _both(said: Iterable[str]) -> str:
    return " · ".join(one for one in said if one)


def _said_least(keys: float, lengths: Iterable[int]) -> str:
    """A break-even among `lengths`; shorter ones were not measured. Empty where there is but one."""
    least, *others = sorted(lengths)
    if not others:
        return ""
    return said_break_even(keys, others[-1]) + (" or fewer" if keys == least else "")


def _faster_from(rows: pd.DataFrame, dtype: str, method: str, lengths: list[int]) -> str:
    """The least of `lengths` from which on a method is faster than our dense attention."""
    where = {"dtype": dtype, "method": method, "metric": "times faster than own dense"}
    return _said_least(break_even_keys({keys: one(rows, context_tokens=keys, **where) for keys in lengths}), lengths)


def first_look_growth() -> str:
    """How a chunk's time grows from 32768 to 131072 keys, where a share of the keys is kept and where a number of them is."""
    lengths, lines = (32768, 65536, 131072), []
    for kept, name in (*((f"{at:.0%}", name) for at, name in _FIRST_LOOK.items()), (f"{_KEPT_KEYS} keys", _KEPT)):
        rows = rows_of(name)
        times = rows[rows.metric == "time"].set_index(["dtype", "method", "context_tokens"]).value
        for dtype in ("float32", "bfloat16"):
            for method in list(_WHOLE_PATHS)[1:]:
                of = {keys: times.get((dtype, method, keys)) for keys in lengths}
                shown = [f"{time:.1f}" if time else "" for time in of.values()]
                lines.append([kept, dtype, _WHOLE_PATHS[method], *shown, f"{of[lengths[-1]] / of[lengths[0]]:.2f}"])
    header = ["kept", "", "milliseconds", *(f"{keys} keys" for keys in lengths), "times as long on four times the keys"]
    others = [source(name, f"{at:.0%}") for at, name in list(_FIRST_LOOK.items())[1:]]
    return "\n\n".join([table(header, lines, _FIRST_LOOK[0.05], "5%"), *others, source(_KEPT, f"{_KEPT_KEYS} keys")])


def first_look_shapes() -> str:
    """Chunks at 32768 keys of other shapes, with and without a first look: how many times faster than our dense attention."""
    models, lines = ("qwen2-0.5b", "qwen2-1.5b", "phonelm-1.5b"), []
    for at, name in _SHAPES_AT.items():
        rows = rows_of(name)
        rows = rows[(rows.part == "keys") & (rows.context_tokens == 32768) & (rows.metric == "times faster than own dense")]
        for dtype in ("float32", "bfloat16"):
            cells = []
            for model in models:
                cells.append(" · ".join(f"{one(rows, model=model, dtype=dtype, method=method):.2f}" for method in _TOTALS))
            lines.append([f"{at:.0%}", dtype, *cells])
    for at, name in _SHAPES_AT.items():
        rows = rows_of(name)
        rows = rows[(rows.part == "keys") & rows.model.isin(models)]
        lengths = sorted(rows.context_tokens.unique())
        for dtype in ("float32", "bfloat16"):
            of_model = (rows[rows.model == model] for model in models)
            even = (_both(_faster_from(of, dtype, method, lengths) for method in _TOTALS) for of in of_model)
            lines.append([f"{at:.0%}", f"{dtype}, break-even, keys", *even])
    header = ["of the keys", "`int8_fused` · `hierarchical`", *(SHAPES[model] for model in models)]
    others = [source(name, f"{at:.0%} of the keys") for at, name in list(_SHAPES_AT.items())[1:]]
    n = f"times faster than our dense attention, 32768 keys; {_EVEN_KEYS}"
    return "\n\n".join([table(header, lines, _SHAPES_AT[0.05], n), *others])


_WHOLE_PATHS = {
    "own dense": "our dense attention",
    "total (int8_fused), per row": "`int8_fused`",
    "total (hierarchical), per row": "`hierarchical`",
}
_TILE_PATHS = _WHOLE_PATHS | {
    f"total (int8_fused), 32-row blocks, {score}": f"a list for 32 rows (`{score}`)" for score in ("leading_query", "probability")
}
_KEPT, _KEPT_KEYS = "first_look_kept", 1638  # 5 % of 32768
_SHAPES_AT = {0.05: "first_look_shapes_05", 0.1: "first_look_shapes_1", 0.2: "attention_speed"}
_FIRST_LOOK = {0.05: "first_look_speed_05", 0.1: "first_look_speed_1", 0.2: "first_look_speed_2"}
# Times faster than our own dense attention at 8192 keys, by dtype and retention.
_PER_ROW_TARGETS = {
    ("float32", 0.05): 4.0,
    ("float32", 0.1): 3.0,
    ("float32", 0.2): 2.0,
    ("bfloat16", 0.05): 3.0,
    ("bfloat16", 0.1): 2.2,
    ("bfloat16", 0.2): 1.5,
}


def per_row_targets() -> str:
    """Lists for every row at 8192 keys beside their targets, on random tensors and on SmolLM2's activations, and their loss."""
    name, quality = "study_activation_speed_smollm2_avx512", "study_first_look_smollm2"
    model, lines = rows_of(name), []
    losses = gains(rows_of(quality)).set_index(["method", "rival", "retention"])
    for (dtype, at), target in _PER_ROW_TARGETS.items():
        where, cells = {"dtype": dtype, "context_tokens": 8192}, []
        random = rows_of(_FIRST_LOOK[at])
        for estimator in _ESTIMATORS:
            method = f"total ({estimator}), per row"
            cells.append(one(random, method=method, metric="times faster than own dense", **where))
        for method in ("per_row", "hierarchical"):
            cells.append(one(model, method=method, retention=at, metric="times_faster_than_own_dense", **where))
        shown = [f"{value:.2f}" if value >= target else f"**{value:.2f}**" for value in cells]
        mass = {"metric": "mass_recall", "retention": at} | where
        flat, looked = (one(model, method=method, **mass) for method in ("per_row", "hierarchical"))
        loss = losses.loc["spared_10_through_1_25", "int8", at]
        of = {"metric": "break_even_keys", "dtype": dtype, "retention": at}
        even = (one(model, method=method, **of) for method in ("per_row", "hierarchical"))
        shown.append(_both(_said_least(keys, model.context_tokens.unique()) for keys in even))
        shown += [f"{looked / flat:.3f}", above(loss)]
        lines.append([f"{dtype}, {at:.0%} of the keys", f"≥ {target:g}", *shown])
    header = ["times faster than our dense attention", "target"]
    header += [
        f"{estimator}, {data}" for data in ("random tensors", "activations") for estimator in ("`int8_fused`", "`hierarchical`")
    ]
    sources = [source(random, f"{at:.0%} of the keys, random tensors") for at, random in list(_FIRST_LOOK.items())[1:]]
    header.append("break-even of both on activations, keys")
    header.append("attention mass of `hierarchical`, of that of `int8_fused`, activations")
    header.append("loss of `hierarchical` above `int8_fused`, nat")
    sources.append(source(name, f"activations; {_EVEN_KEYS}"))
    sources.append(source(quality, f"the loss, in windows of 2048 tokens, 95 % intervals, paired; n = {int(losses.n.iloc[0])}"))
    first = table(header, lines, _FIRST_LOOK[0.05], "5% of the keys, random tensors; below the target in bold")
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
            ratios[level] = [of[of.method == method].set_index("retention").value for method in _TOTALS]
        time = (one(rows, metric="time", method="own dense", retention=0.2, model=shape, dtype=dtype) for rows in tables.values())
        lines.append([SHAPES[shape], dtype, "our dense attention, ms", *(f"{ms:.1f}" for ms in time)])
        for at in (0.05, 0.1, 0.2):
            cells = (" · ".join(f"{ratio[at]:.2f}" for ratio in of_level) for of_level in ratios.values())
            lines.append([SHAPES[shape], dtype, f"{at:.0%} of the keys", *cells])
        even = (" · ".join(_share(ratio.to_dict()) for ratio in of_level) for of_level in ratios.values())
        lines.append([SHAPES[shape], dtype, "break-even, of the keys", *even])
    header = ["", "", "`int8_fused` · `hierarchical`", *(f"`{level}`" for level in _LEVELS)]
    rounds = int(first[first.metric == "time"].n.max())
    n = f"`{_LEVELS[0]}`; times faster than our dense attention by these kernels, 8192 keys, medians of {rounds} rounds; {_EVEN}"
    others = [source(f"level_{level}", f"`{level}`") for level in _LEVELS[1:]]
    return "\n\n".join([table(header, lines, f"level_{_LEVELS[0]}", n), *others])


def activation_speed_amx() -> str:
    """The whole path on SmolLM2's own queries, keys and values where tiles multiply bfloat16."""
    return _activation_speed(_ACTIVATIONS_AMX)


def activation_speed_avx2_vnni() -> str:
    """The whole path on SmolLM2's own queries, keys and values, by the kernels of level `avx2_vnni`."""
    return _activation_speed("activations_avx2_vnni")


def per_row_targets_shapes() -> str:
    """The same on random tensors of other shapes, and where lists for every row stop being faster than dense attention."""
    rows = rows_of("attention_speed")
    rows = rows[(rows.part == "retention") & (rows.metric == "times faster than own dense")]
    shapes, lines = list(dict.fromkeys(rows.model)), []
    for (dtype, at), target in _PER_ROW_TARGETS.items():
        cells = []
        for shape in shapes:
            values = [_by_retention(estimator, shape, dtype)[at] for estimator in _ESTIMATORS]
            cells.append(" · ".join(f"{value:.2f}" if value >= target else f"**{value:.2f}**" for value in values))
        lines.append([f"{dtype}, {at:.0%} of the keys", f"≥ {target:g}", *cells])
    for dtype in dict.fromkeys(rows.dtype):
        lines.append([f"{dtype}, break-even", "", *(_even_shares(shape, dtype) for shape in shapes)])
    header = ["`int8_fused` · `hierarchical`", "target", *(SHAPES[shape] for shape in shapes)]
    rounds = int(rows.n.min())
    n = f"8192 keys, times faster than our dense attention, medians of {rounds} rounds; below the target in bold; {_EVEN}"
    return table(header, lines, "attention_speed", n)


def tile_targets() -> str:
    """Lists for every row beside their targets where tiles multiply bfloat16, on random tensors of all shapes."""
    rows, lines = rows_of(_STAGES_AMX), []
    for (dtype, at), target in _PER_ROW_TARGETS.items():
        where, cells = {"dtype": dtype, "retention": at, "metric": "times faster than own dense"}, []
        for shape in SHAPES:
            values = (one(rows, method=f"total ({estimator}), per row", model=shape, **where) for estimator in _ESTIMATORS)
            cells.append(" · ".join(f"{value:.2f}" if value >= target else f"**{value:.2f}**" for value in values))
        lines.append([f"{dtype}, {at:.0%} of the keys", f"≥ {target:g}", *cells])
    faster = (
        rows[rows.metric == "times faster than own dense"].set_index(["dtype", "model", "method", "retention"]).value.sort_index()
    )
    for dtype in dict.fromkeys(dtype for dtype, _ in _PER_ROW_TARGETS):
        even = ((_share(faster[dtype, shape, method].to_dict()) for method in (_FLAT, _LOOKED)) for shape in SHAPES)
        lines.append([f"{dtype}, break-even", "", *(" · ".join(both) for both in even)])
    header = ["`int8_fused` · `hierarchical`", "target", *SHAPES.values()]
    rounds = int(rows[rows.metric == "time"].n.min())
    n = f"8192 keys, times faster than our dense attention, medians of {rounds} rounds; below the target in bold; {_EVEN}"
    return table(header, lines, _STAGES_AMX, n)


_EVEN_AMX = {
    "sdpa": "SDPA",
    _FLAT: "`int8_fused`, a list for each row",
    _LOOKED: "`hierarchical`, a list for each row",
    "total (int8_fused), 32-row blocks, leading_query": "`int8_fused`, a list for 32 rows (`leading_query`)",
}


def tile_even() -> str:
    """The whole path on random tensors where tiles multiply bfloat16: up to which share of the keys it is faster than dense
    attention, and from how many keys on.
    """
    rows = rows_of(_SPEED_AMX)
    rows = rows[rows.metric == "times faster than own dense"]
    by_share, by_length = (rows[rows.part == part] for part in ("retention", "keys"))
    lengths, lines = sorted(by_length.context_tokens.unique()), []

    def cell(method: str, dtype: str, shape: str) -> str:
        where = {"method": method, "dtype": dtype, "model": shape}
        at_fifth = f"{one(by_length, context_tokens=8192, **where):.2f}"
        if method == "sdpa":
            return at_fifth
        shares = by_share[(by_share.method == method) & (by_share.dtype == dtype) & (by_share.model == shape)]
        even = _share(shares.set_index("retention").value.to_dict())
        return f"{at_fifth} · {even} · {_faster_from(by_length[by_length.model == shape], dtype, method, lengths)}"

    for dtype in dict.fromkeys(rows.dtype):
        lines += [[dtype, words, *(cell(method, dtype, shape) for shape in SHAPES)] for method, words in _EVEN_AMX.items()]
    n = (
        "times faster than our dense attention at 20% of 8192 keys · share of 8192 keys above which dense attention is faster · "
        f"fewest of the measured numbers of keys from which on lists are, at 20%; medians of {int(rows.n.min())} rounds or more"
    )
    return table(["", "", *SHAPES.values()], lines, _SPEED_AMX, n)


def tile_targets_long() -> str:
    """The same of 32768 keys, where `hierarchical` has the flat path beside it: twice its speed was the target."""
    rows, lines = rows_of("attention_stages_32768_amx"), []
    faster = rows[rows.metric == "times faster than own dense"].set_index(["dtype", "retention", "model", "method"]).value
    for dtype, at in _PER_ROW_TARGETS:
        cells = []
        for model in SHAPES:
            flat, looked = (faster[dtype, at, model, method] for method in (_FLAT, _LOOKED))
            quotient = looked / flat
            cells.append(f"{flat:.2f} · {looked:.2f} · " + (f"{quotient:.2f}" if quotient >= 2 else f"**{quotient:.2f}**"))
        lines.append([f"{dtype}, {at:.0%} of the keys", *cells])
    header = ["`int8_fused` · `hierarchical` · their quotient", *SHAPES.values()]
    n = f"32768 keys, times faster than our dense attention, medians of {int(rows[rows.metric == 'time'].n.min())} rounds; "
    n += "quotients below 2 in bold"
    return table(header, lines, "attention_stages_32768_amx", n)


def tile_stages() -> str:
    """The paths that have a target in bfloat16, where tiles multiply it: each stage as a share of our dense attention's time."""
    rows, lines, quotients = rows_of(_STAGES_AMX), [], []
    rows = rows[rows.dtype == "bfloat16"]
    for model, (method, at) in itertools.product(SHAPES, ((_LOOKED, 0.05), (_LOOKED, 0.1), (_FLAT, 0.2))):
        of = rows[(rows.model == model) & (rows.retention == at)]
        dense, path = one(of, method="own dense", metric="time"), of[of.method == method].set_index("metric").value
        shares = [path.get(STAGE + stage, 0.0) / dense for stage in candidates.STAGES]
        target = 1 / _PER_ROW_TARGETS["bfloat16", at]
        quotients.append(sum(shares) * dense / path["time"])
        estimator = "`hierarchical`" if method == _LOOKED else "`int8_fused`"
        cells = (f"{share:.0%}" if share else "" for share in shares)
        lines.append([SHAPES[model], f"{estimator}, {at:.0%}", f"{dense:.1f}", *cells, f"{sum(shares):.0%}", f"{target:.0%}"])
    header = ["", "of the keys", "our dense attention, ms", *candidates.STAGES, "all", "target"]
    rounds = int(rows[rows.metric == "time"].n.min())
    n = f"bfloat16, 8192 keys, shares of our dense attention's time, medians of {rounds} rounds, "
    n += f"whose sums are {min(quotients):.2f} to {max(quotients):.2f} of the times without clocks"
    return table(header, lines, _STAGES_AMX, n)


def tile_roofline() -> str:
    """The share of the tiles' own peaks that stages reach, and how many times as fast as our dense attention a path would be with
    the products of these at the peak and the rest as it is: form and softmax as timed.
    """
    rows, cells = rows_of(_STAGES_AMX), {}
    peaks = rows[rows.method == "machine"].set_index("metric").value
    rows = rows[rows.dtype == "bfloat16"]
    values = rows.set_index(["model", "retention", "method", "metric"]).value.sort_index()
    first = rows.iloc[0]
    for model, at in itertools.product(SHAPES, sorted(rows.retention.dropna().unique())):
        heads, dim = rows.loc[rows.model == model, ["heads", "head_dim"]].iloc[0]
        seen = first.chunk_rows * (first.context_tokens - (first.chunk_rows - 1) / 2)  # pairs of rows and keys of a head
        block = _pairs_of_blocks(first, heads, at)
        dense, flat, path = (values[model, at, method] for method in ("own dense", _FLAT, _LOOKED))
        ms = {
            ("own dense",): (4 * heads * seen, "bfloat16", dense["time"]),
            (_FLAT, "estimate"): (2 * heads * seen, "int8", flat[STAGE + "estimate"]),
            (_LOOKED, "attend together"): (4 * block, "bfloat16", path[STAGE + "attend together"]),
            (_LOOKED, "estimate"): (2 * block, "int8", path[STAGE + "estimate"]),
        }
        least = {of: operations * dim / peaks[f"peak {kind} tiles"] / 1e6 for of, (operations, kind, _) in ms.items()}
        cells |= {(model, *of, at): f"{least[of] / time:.0%}" for of, (_, _, time) in ms.items()}
        products = path[STAGE + "estimate"] + path[PART + "scores"] + path[PART + "values"]
        saved = (products - least[_LOOKED, "estimate"] - least[_LOOKED, "attend together"]) / path["time with stages timed"]
        cells[model, _LOOKED, "at the peak", at] = f"{dense['time'] / (path['time'] - saved):.2f}"
    lines = []
    for at in sorted({key[-1] for key in cells}):
        for of, said in _ROOFLINE.items():
            lines.append([f"{at:.0%} of the keys", said, *(cells[model, *of, at] for model in SHAPES)])
    header = ["", "bfloat16", *SHAPES.values()]
    rounds = int(rows[rows.metric == "time"].n.min())
    said = ", ".join(f"{name} {value:.0f}" for name, value in peaks.items() if "peak" in name)
    n = f"{int(first.context_tokens)} keys, medians of {rounds} rounds, peaks of the fastest; products after a first look are of "
    n += f"the keys that blocks let through; {said}, in 10⁹ operations a second"
    return table(header, lines, _STAGES_AMX, n)


def tile_parts() -> str:
    """Where the time of attention of blocks goes where tiles multiply bfloat16: shares in our dense attention, and how many times
    as long a score takes after a first look.
    """
    rows, lines = rows_of(_STAGES_AMX), []
    rows = rows[(rows.dtype == "bfloat16") & rows.method.isin(("own dense", _LOOKED))]
    values = rows.set_index(["model", "retention", "method", "metric"]).value.sort_index()
    first = rows.iloc[0]
    for model, at in itertools.product(SHAPES, sorted(rows.retention.unique())):
        heads = rows.heads[rows.model == model].iloc[0]
        dense, looked = (values[model, at, method] for method in ("own dense", _LOOKED))
        seen = heads * first.chunk_rows * (first.context_tokens - (first.chunk_rows - 1) / 2)
        dense, looked = (path[[PART + part for part in native.PARTS]] for path in (dense, looked))  # of the same calls
        more = seen / _pairs_of_blocks(first, heads, at)  # scores of dense attention, over those of blocks
        longer = looked / dense * more
        cells = (f"{share:.0%} · {times:.1f}" for share, times in zip(dense / dense.sum(), longer, strict=True))
        lines.append([SHAPES[model], f"{at:.0%}", *cells, f"{looked.sum() / dense.sum() * more:.1f}"])
    header = ["bfloat16", "of the keys", *native.PARTS, "all"]
    rounds = int(rows[rows.metric == "time"].n.min())
    n = "8192 keys, shares in our dense attention · times as long for each score in blocks after a first look, of as many as by "
    n += f"calculation, hidden ones too; medians of {rounds} rounds"
    return table(header, lines, _STAGES_AMX, n)


_ROOFLINE = {
    ("own dense",): "our dense attention, of the peak of bfloat16 tiles",
    (_LOOKED, "attend together"): "`hierarchical`, attend together, of the peak of bfloat16 tiles",
    (_LOOKED, "estimate"): "`hierarchical`, estimate, of the peak of INT8 tiles",
    (_LOOKED, "at the peak"): "`hierarchical`, times faster than dense with both products at the peak",
    (_FLAT, "estimate"): "`int8_fused`, estimate, of the peak of INT8 tiles",
}
_ACTIVATIONS_AMX, _STAGES_AMX = "study_activation_speed_smollm2_amx", "attention_stages_8192_amx"
_SPEED_AMX = "attention_speed_amx"


def first_look_recall() -> str:
    """The attention mass that a first look leaves on lists of single rows, and what it saves, on the activations of a model."""
    tables, lines = {look: rows_of(name) for look, name in _LOOKS.items()}, []
    for (through, spared), rows in tables.items():
        for keys, at in rows[rows.metric == "mass_recall"].groupby(["context_tokens", "retention"]).groups:
            where = {"context_tokens": keys, "retention": at}
            mass, times, faster = (
                [one(rows, metric=metric, method=method, **where) for method in ("per_row", "hierarchical")]
                for metric in ("mass_recall", "time", "times_faster_than_own_dense")
            )
            even = (one(rows, metric="break_even_keys", method=method, retention=at) for method in ("per_row", "hierarchical"))
            shown = [f"{mass[0]:.4f}", f"{mass[1]:.4f}", f"{mass[1] / mass[0]:.4f}", *(f"{ratio:.2f}" for ratio in faster)]
            shown += [f"{times[0] / times[1]:.2f}", _both(_said_least(x, rows.context_tokens.unique()) for x in even)]
            lines.append([f"{keys}", f"{at:.0%}", f"{through:g}", f"{spared:.0%}", *shown])
    header = [
        "keys",
        "of the keys",
        "times the budget let through",
        "heads spared",
        "attention mass, `int8_fused`",
        "attention mass, `hierarchical`",
    ]
    header += [
        "share of it",
        *(f"times faster than our dense attention, `{name_of}`" for name_of in _ESTIMATORS),
    ]
    header += ["`hierarchical`, times faster than `int8_fused`", "break-even of both, keys"]
    first = next(iter(tables.values())).query("metric == 'time'").iloc[0]
    n = f"{first['dtype']}, {first.chunk_rows} rows a layer, medians of {first.n} rounds; {_EVEN_KEYS}"
    (_, whole), *others = _LOOKS.items()
    sources = [source(name, f"{through:g} times the budget, {spared:.0%} of the heads") for (through, spared), name in others]
    return "\n\n".join([table(header, lines, whole, n), *sources])


# Times the budget that a first look lets through, and the share of the heads that it spares.
_LOOKS = {
    (1.25, 0.1): "study_activation_speed_qwen2_5_coder",
    (2.0, 0.1): "study_activation_speed_qwen2_5_coder_through_2",
    (1.25, 0.06): "study_activation_speed_qwen2_5_coder_spared_06",
    (1.25, 0.03): "study_activation_speed_qwen2_5_coder_spared_03",
}
_SHOWN_BLOCK = 32


def _activation_speed(name: str) -> str:
    """Times faster than dense attention by length, and break-even."""
    rows = rows_of(name)
    lengths = sorted(rows.context_tokens.unique())
    ratios = rows[rows.metric == "times_faster_than_own_dense"]
    layers = rows[(rows.metric == "layer_times_faster_than_own_dense") & (rows.context_tokens == lengths[-1])]
    lines = []
    ratios = ratios[ratios.query_block.isin([1, _SHOWN_BLOCK])]  # loss against time shows the others
    for (dtype, block, at, method), cell in ratios.groupby(["dtype", "query_block", "retention", "method"], sort=False):
        of = {"dtype": dtype, "method": method, "retention": at}
        values = [f"{one(cell, context_tokens=keys):.2f}" for keys in lengths]
        if method == "sdpa":
            lines.append([dtype, "SDPA", "", *values, "", ""])
            continue
        even = _said_least(one(rows, metric="break_even_keys", **of), lengths)
        by_layer = layers[(layers.dtype == dtype) & (layers.method == method) & (layers.retention == at)].value
        spread = f"{by_layer.min():.2f} to {by_layer.max():.2f}"
        rows_of_list = {"per_row": "each row", "hierarchical": "each row, after a first look"}.get(method, f"{block} rows")
        lines.append([dtype, rows_of_list, f"{at:.0%}", *values, even, spread])
    header = ["", "a list for", "of the keys", *(f"{keys} keys" for keys in lengths), "break-even, keys"]
    header.append(f"layers at {lengths[-1]} keys")
    n = f"times faster than our dense attention, medians of {int(rows[rows.metric == 'time'].n.iloc[0])} rounds"
    return table(header, lines, name, n)


def activation_stages() -> str:
    """What lists for every row spend their time on, on SmolLM2's activations, and what each part alone would gain."""
    return _activation_stages("study_activation_speed_smollm2_avx512", 8192)


def _activation_stages(name: str, keys: int) -> str:
    rows = rows_of(name)
    times = rows[(rows.metric == "time") & (rows.context_tokens == keys)]
    lines = []
    for dtype, some in times.groupby("dtype", sort=False):
        dense, quantise, estimate = (one(some, method=method) for method in ("own_dense", "quantise", "estimate"))
        for at, cell in some[some.retention < 1].groupby("retention"):
            of = cell.set_index("method").value
            before = quantise + of["choose"]
            attend = of["per_row"] - before
            parts = (quantise, estimate, of["choose"] - estimate, attend, of["per_row"], of["hierarchical"])
            bounds = (dense / before, dense / attend, at * dense / attend)
            shown = (*(f"{time:.0f}" for time in (dense, *parts)), *(f"{bound:.2f}" for bound in bounds))
            lines.append([f"{dtype}, {at:.0%} of the keys", *shown])
    header = ["milliseconds, all layers", "our dense attention", "quantise", "estimate", "select", "attend (the rest)"]
    header += ["`int8_fused`", "`hierarchical`", "dense / (quantise + estimate + select)", "dense / attend"]
    header.append("speed of attend, of dense attention's")
    n = f"{keys} keys, medians of {int(times.n.iloc[0])} rounds; speed: multiplications a second"
    return table(header, lines, name, n)


_CLOCKED = {"per_row": "each row", "hierarchical": "each row, after a first look", "shared_32": "32 rows"}
_FIFTH = 0.2


def clocked_stages() -> str:
    """Where the time of whole paths goes on SmolLM2's activations, by clocks in the kernels."""
    return _clocked_stages("activation_stages_smollm2")


def clocked_stages_amx() -> str:
    """The same where tiles multiply bfloat16."""
    return _clocked_stages(_ACTIVATIONS_AMX)


def _clocked_stages(name: str) -> str:
    rows = rows_of(name)
    keys = rows.context_tokens.max()
    rows = rows[rows.context_tokens == keys]
    stages = [STAGE + stage for stage in candidates.STAGES]
    timed = rows[rows.metric.isin(stages)].set_index(["dtype", "method", "retention", "metric"]).value.to_dict()
    lines, quotients = [], []
    for dtype in rows.dtype.unique():
        for method, label in _CLOCKED.items():
            for at in sorted(rows[rows.method == method].retention.unique()):
                of = [timed.get((dtype, method, at, stage), 0.0) for stage in stages]
                lines.append([dtype, label, f"{at:.0%}", *(f"{time:.0f}" if time else "" for time in of), f"{sum(of):.0f}"])
                quotients.append(sum(of) / one(rows, dtype=dtype, method=method, retention=at, metric="time"))
        dense = one(rows, dtype=dtype, method="own_dense", metric="time")
        lines.append([dtype, "our dense attention", "", *[""] * len(stages), f"{dense:.0f}"])
    header = ["milliseconds, all layers", "a list for", "of the keys", *candidates.STAGES, "all"]
    n = f"{keys} keys, medians of {int(rows[rows.metric == 'time'].n.iloc[0])} rounds of each stage, whose sums are "
    n += f"{min(quotients):.2f} to {max(quotients):.2f} of the times without clocks"
    return table(header, lines, name, n)


def looked_stages() -> str:
    """The share of each stage in the time of `hierarchical` at a fifth of 32768 keys, and what of it spared heads are."""
    rows = rows_of("attention_stages_32768")
    values = rows[(rows.retention == _FIFTH) & (rows.method == _LOOKED)].set_index(["model", "dtype", "metric"]).value.to_dict()
    cases = [(model, dtype) for model in SHAPES for dtype in ("float32", "bfloat16")]
    whole = {case: sum(values.get((*case, STAGE + stage), 0.0) for stage in candidates.STAGES) for case in cases}

    def shares(stage: str, model: str) -> str:
        of = [(model, dtype) for dtype in ("float32", "bfloat16")]
        return " · ".join(f"{values.get((*case, STAGE + stage), 0.0) / whole[case]:.0%}" for case in of)

    used = [stage for stage in candidates.STAGES if any((*case, STAGE + stage) in values for case in cases)]
    lines = [[stage, *(shares(stage, model) for model in SHAPES)] for stage in used]
    header = ["float32 · bfloat16", *SHAPES.values()]
    (keys,), slower = rows.context_tokens.unique(), rows[rows.metric == "time with stages timed"].value
    n = f"{keys} keys, {_FIFTH:.0%} of them, medians of {int(rows.n.max())} rounds of each stage; with clocks paths take "
    n += f"{slower.min():.2f} to {slower.max():.2f} times as long"
    return table(header, lines, "attention_stages_32768", n)


def looked_roofline() -> str:
    """The share of the machine's peak that products after a first look reach at 32768 keys; how many times as fast as the flat
    path `hierarchical` is, and would be if these products were at the peak and all else but spared heads took no time.
    """
    rows, speed = rows_of("attention_stages_32768"), rows_of("attention_speed")
    peaks = speed[speed.method == "machine"].set_index("metric").value
    values = rows.set_index(["model", "dtype", "retention", "method", "metric"]).value.sort_index()
    first, cells = rows.iloc[0], {}
    for model, dtype, at in itertools.product(SHAPES, ("float32", "bfloat16"), sorted(rows.retention.dropna().unique())):
        looked, flat = (values[model, dtype, at, method] for method in (_LOOKED, _FLAT))
        kinds = {"attend together": (4, dtype), "estimate": (2, "int8")}  # operations a key, row and dimension
        heads, dim = rows.loc[rows.model == model, ["heads", "head_dim"]].iloc[0]
        pairs = _pairs_of_blocks(first, heads, at) * dim
        at_peak = {stage: each * pairs / peaks[f"peak {kind}"] / 1e6 for stage, (each, kind) in kinds.items()}
        of_peak = {stage: f"{ms / looked[STAGE + stage]:.0%}" for stage, ms in at_peak.items()}
        least = sum(min(ms, looked[STAGE + stage]) for stage, ms in at_peak.items()) + looked[STAGE + "spared heads"]
        faster = {"measured": f"{flat['time'] / looked['time']:.2f}", "at most": f"{flat['time'] / least:.2f}"}
        cells[model, dtype, at] = of_peak | faster
    words = {
        "attend together": "attend together, of the peak",
        "estimate": "estimate, of the INT8 peak",
        "measured": "times as fast as the flat path",
        "at most": "with these products at the peak or as they are, all else but spared heads in no time",
    }
    lines = []
    for at, (kind, said) in itertools.product(sorted({at for *_, at in cells}), words.items()):
        both = (" · ".join(cells[model, dtype, at][kind] for dtype in ("float32", "bfloat16")) for model in SHAPES)
        lines.append([f"{at:.0%} of the keys" if kind == "attend together" else "", said, *both])
    header = ["", "float32 · bfloat16", *SHAPES.values()]
    n = f"{first.context_tokens} keys, medians of {int(rows.n.max())} rounds; products are of the keys that blocks let through"
    return f"{table(header, lines, 'attention_stages_32768', n)}\n\n{source('attention_speed', 'the peaks')}"


def _pairs_of_blocks(row: pd.Series, heads: int, retention: float) -> float:
    """Pairs of rows and keys that meet after a first look, in the heads of a chunk that are not spared one."""
    keys = _keys_of_blocks(int(row.context_tokens), int(row.chunk_rows), retention)
    return (heads - math.ceil(candidates.LOOKED["flat_share"] * heads)) * candidates.LOOKED["block_rows"] * keys


def _keys_of_blocks(keys: int, rows: int, retention: float) -> float:
    """How many keys all blocks of a chunk's rows read together, where those nearest are chosen no more often than others, as on
    random tensors.
    """
    block, through = candidates.LOOKED["block_rows"], candidates.LOOKED["candidates"] * retention
    chosen = sum(math.ceil(through * (keys - rows + last + 1)) for last in range(block - 1, rows, block))
    return chosen + rows // block * (block * (1 - through) + block - 1)  # and the nearest anyway, and all later ones


def peak_memory() -> str:
    """Peak memory of every path at 32k keys; of short chunks, and with AMX, the largest of all shapes."""
    return _peak_memory("memory_32k", _MEMORY_TARGET_MB, {"memory_32k_128": "128 rows", "memory_32k_amx": "with AMX"})


def peak_memory_128k() -> str:
    """The same at 128k keys."""
    return _peak_memory("memory_128k", _LONG_MEMORY_TARGET_MB)


def _peak_memory(name: str, target: float, others: Mapping[str, str] | None = None) -> str:
    """`others`: files of other runs, and what each is called, of whose cases the largest peak is shown."""
    rows = rows_of(name)
    cases = list(dict.fromkeys(zip(rows.model, rows.dtype, strict=True)))

    def shown(value: float) -> str:
        return f"{value:.0f}" if value <= target else f"**{value:.0f}**"

    lines = [
        [method, *(shown(one(rows, method=method, model=model, dtype=dtype)) for model, dtype in cases)]
        for method in dict.fromkeys(rows.method)
    ]
    header = ["MB beyond q, k, v and output", *(f"{SHAPES[model]} {dtype}" for model, dtype in cases)]
    of = f"chunks of {int(rows.chunk_rows.max())} rows, {int(rows.context_tokens.iloc[0])} keys, one run each"
    notes = f"{of}; above the target of {target} MB in bold"
    sources = []
    for other, words in (others or {}).items():
        rows = rows_of(other)
        most, height = rows.groupby("method").value.max(), int(rows.chunk_rows.max())
        lines = [[*line, shown(most[line[0]])] for line in lines]
        header.append(f"{words}, largest")
        keys = int(rows.context_tokens.iloc[0])
        sources.append(source(other, f"chunks of {height} rows, {keys} keys, the largest of the eight cases"))
    return "\n\n".join([table(header, lines, name, notes), *sources])


_MEMORY_TARGET_MB, _LONG_MEMORY_TARGET_MB = 256, 1000


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
        first, target = of.iloc[0], _PER_ROW_TARGETS[dtype, 0.2]
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
    return _decode("attention_speed")


def decode_amx() -> str:
    """The same where tiles multiply bfloat16."""
    return _decode(_SPEED_AMX)


def _decode(name: str) -> str:
    rows = rows_of(name)
    rows = rows[rows.part == "decode"]
    lengths, cases = (8192, 32768), list(dict.fromkeys(zip(rows.model, rows.dtype, strict=True)))

    def cell(method: str, model: str, dtype: str) -> str:
        where = {"method": method, "model": model, "dtype": dtype, "metric": "times faster than own dense"}
        return " · ".join(f"{one(rows, context_tokens=keys, **where):.2f}" for keys in lengths)

    lines = [[method, *(cell(method, *case) for case in cases)] for method in dict.fromkeys(rows.method)]
    step, every = "total (int8_fused), shared list", sorted(rows.context_tokens.unique())
    even = (_faster_from(rows[rows.model == model], dtype, step, every) for model, dtype in cases)
    lines.append([f"{step}: break-even, keys", *even])
    header = ["times faster than our dense attention", *(f"{SHAPES[m]} {d}" for m, d in cases)]
    rounds = int(rows[rows.metric == "time"].n.max())
    return table(header, lines, name, f"{lengths[0]} · {lengths[1]} keys, retention 0.2, medians of {rounds} rounds")


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


_BESIDE = {
    "sdpa": "SDPA",
    "own dense": "our dense attention",
    "total (int8_fused), per row": "`int8_fused`, lists of single rows",
    "total (hierarchical), per row": "`hierarchical`, lists of single rows",
    "total (int8_fused), 32-row blocks, probability": "`int8_fused`, lists of 32 rows",
    "total (int8_graph), per row": "`int8_graph`, lists of single rows",
}


def beside_work() -> str:
    """Times of attention beside other programs."""
    return _beside_work("study_beside_work")


def beside_work_amx() -> str:
    """The same where tiles multiply bfloat16."""
    return _beside_work("study_beside_work_amx")


def _beside_work(name: str) -> str:
    rows = rows_of(name)
    loads = list(dict.fromkeys(rows.load))
    lines = []
    for (dtype, waiting), some in rows.groupby(["dtype", "waiting"], sort=False):
        cells = some.set_index(["method", "load", "metric"]).value
        for index, (method, words) in enumerate(_BESIDE.items()):
            times = [
                f"{cells[method, load, 'time']:.1f}" + ("" if load == loads[0] else f" · {cells[method, load, 'slowdown']:.2f}")
                for load in loads
            ]
            lines.append([f"{dtype}, threads {waiting}" if index == 0 else "", words, *times])
    header = ["", "milliseconds · times those beside nothing", *(f"beside {load}" for load in loads)]
    first = rows.iloc[0]
    n = (
        f"SmolLM2's shape, random tensors, {first.chunk_rows} rows of {first.context_tokens} keys, {first.retention:.0%} of the "
        f"keys; medians of {first.n} rounds, quotients within a round"
    )
    return table(header, lines, name, n)


# Runs of the same study with fewer and with more rows in a chunk.
_BESIDE_LENGTHS = ("beside_work_128", "study_beside_work", "beside_work_2048")


def beside_lengths() -> str:
    """How much slower attention becomes beside other programs, by the length of a call: chunks of more and fewer rows."""
    runs = {name: rows_of(name) for name in _BESIDE_LENGTHS}
    lines = []
    for method, words in _BESIDE.items():
        shown = []
        for rows in runs.values():
            own = rows[rows.method == method]
            quiet = own[(own.load == rows.load.iloc[0]) & (own.metric == "time")].value
            loaded = own[own.load != rows.load.iloc[0]].groupby("metric").value
            of = (loaded.get_group(metric).median() for metric in ("slowdown", "slowdown_over_sdpa", "cpu_time_over_quiet"))
            shown.append(" · ".join([f"{quiet.min():.0f} … {quiet.max():.0f}", *(f"{value:.2f}" for value in of)]))
        lines.append([words, *shown])
    header = ["", *(f"{rows.chunk_rows.iloc[0]} rows" for rows in runs.values())]
    first = runs["study_beside_work"]
    cases = len(first[(first.metric == "slowdown") & (first.method == "sdpa") & (first.load != first.load.iloc[0])])
    cells = (
        "milliseconds beside nothing · times those, beside others · that over SDPA's of the same rows · times the processor time"
    )
    rounds = sorted({int(rows.n.iloc[0]) for rows in runs.values()})
    n = f"{cells}; medians of {cases} cases, each of {rounds[0]} to {rounds[-1]} rounds"
    others = (source(name, "chunks of other lengths") for name in _BESIDE_LENGTHS if name != "study_beside_work")
    return "\n\n".join([table(header, lines, "study_beside_work", n), *others])
