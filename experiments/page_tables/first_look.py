"""Lists of single rows after a first look, beside those by the flat estimate."""

import itertools
from collections.abc import Mapping

from experiments.page_tables.attention_common import (
    ESTIMATORS,
    EVEN_KEYS,
    FIFTH,
    FIRST_LOOK,
    FLAT,
    LOOKED,
    STAGES_AMX,
    TOTALS,
    WHOLE_PATHS,
    both,
    faster_from,
    pairs_of_blocks,
    said_least,
)
from experiments.page_tables.common import SHAPES, one, rows_of, source, table
from experiments.studies import attention_candidates as candidates
from shadowattn.reporting.figures.attention_stages import STAGE


def first_look_speed() -> str:
    """Chunks of many keys with a list for every row, with and without a first look: times and how many times faster."""
    tables = {at: rows_of(name) for at, name in FIRST_LOOK.items()}
    lengths = sorted(tables[0.05].context_tokens.unique())
    lines = []
    for at, rows in tables.items():
        for dtype in ("float32", "bfloat16"):
            for method, words in WHOLE_PATHS.items():
                cells = []
                for keys in lengths:
                    where = {"dtype": dtype, "method": method, "context_tokens": keys}
                    time = f"{one(rows, metric='time', **where):.1f}"
                    ratio = "" if method == "own dense" else f" · {one(rows, metric='times faster than own dense', **where):.2f}"
                    cells.append(time + ratio)
                cells.append("" if method == "own dense" else faster_from(rows, dtype, method, lengths))
                lines.append([f"{at:.0%}", dtype, words, *cells])
    header = ["of the keys", "", "milliseconds · times faster than our dense attention", *(f"{keys} keys" for keys in lengths)]
    header.append("break-even, keys")
    first = tables[0.05]
    rounds = int(first[first.metric == "time"].n.min())
    n = f"medians of {rounds} rounds or more; {EVEN_KEYS}"
    others = [source(name, f"{at:.0%} of the keys") for at, name in list(FIRST_LOOK.items())[1:]]
    return "\n\n".join([table(header, lines, FIRST_LOOK[0.05], n), *others])


def first_look_growth() -> str:
    """How a chunk's time grows from 32768 to 131072 keys, where a share of the keys is kept and where a number of them is."""
    lengths, lines = (32768, 65536, 131072), []
    for kept, name in (*((f"{at:.0%}", name) for at, name in FIRST_LOOK.items()), (f"{_KEPT_KEYS} keys", _KEPT)):
        rows = rows_of(name)
        times = rows[rows.metric == "time"].set_index(["dtype", "method", "context_tokens"]).value
        for dtype in ("float32", "bfloat16"):
            for method in list(WHOLE_PATHS)[1:]:
                of = {keys: times.get((dtype, method, keys)) for keys in lengths}
                shown = [f"{time:.1f}" if time else "" for time in of.values()]
                lines.append([kept, dtype, WHOLE_PATHS[method], *shown, f"{of[lengths[-1]] / of[lengths[0]]:.2f}"])
    header = ["kept", "", "milliseconds", *(f"{keys} keys" for keys in lengths), "times as long on four times the keys"]
    others = [source(name, f"{at:.0%}") for at, name in list(FIRST_LOOK.items())[1:]]
    return "\n\n".join([table(header, lines, FIRST_LOOK[0.05], "5%"), *others, source(_KEPT, f"{_KEPT_KEYS} keys")])


def first_look_shapes() -> str:
    """Chunks at 32768 keys of other shapes, with and without a first look: how many times faster than our dense attention."""
    models, lines = ("qwen2-0.5b", "qwen2-1.5b", "phonelm-1.5b"), []
    for at, name in _SHAPES_AT.items():
        rows = rows_of(name)
        rows = rows[(rows.part == "keys") & (rows.context_tokens == 32768) & (rows.metric == "times faster than own dense")]
        for dtype in ("float32", "bfloat16"):
            cells = []
            for model in models:
                cells.append(" · ".join(f"{one(rows, model=model, dtype=dtype, method=method):.2f}" for method in TOTALS))
            lines.append([f"{at:.0%}", dtype, *cells])
    for at, name in _SHAPES_AT.items():
        rows = rows_of(name)
        rows = rows[(rows.part == "keys") & rows.model.isin(models)]
        lengths = sorted(rows.context_tokens.unique())
        for dtype in ("float32", "bfloat16"):
            of_model = (rows[rows.model == model] for model in models)
            even = (both(faster_from(of, dtype, method, lengths) for method in TOTALS) for of in of_model)
            lines.append([f"{at:.0%}", f"{dtype}, break-even, keys", *even])
    header = ["of the keys", "`int8_fused` · `hierarchical`", *(SHAPES[model] for model in models)]
    others = [source(name, f"{at:.0%} of the keys") for at, name in list(_SHAPES_AT.items())[1:]]
    n = f"times faster than our dense attention, 32768 keys; {EVEN_KEYS}"
    return "\n\n".join([table(header, lines, _SHAPES_AT[0.05], n), *others])


_KEPT, _KEPT_KEYS = "first_look_kept", 1638  # 5 % of 32768


_SHAPES_AT = {0.05: "first_look_shapes_05", 0.1: "first_look_shapes_1", 0.2: "attention_speed"}


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
            shown += [f"{times[0] / times[1]:.2f}", both(said_least(x, rows.context_tokens.unique()) for x in even)]
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
        *(f"times faster than our dense attention, `{name_of}`" for name_of in ESTIMATORS),
    ]
    header += ["`hierarchical`, times faster than `int8_fused`", "break-even of both, keys"]
    first = next(iter(tables.values())).query("metric == 'time'").iloc[0]
    n = f"{first['dtype']}, {first.chunk_rows} rows a layer, medians of {first.n} rounds; {EVEN_KEYS}"
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


def looked_stages() -> str:
    """The share of each stage in the time of `hierarchical` at a fifth of 32768 keys, and what of it spared heads are."""
    rows = rows_of("attention_stages_32768")
    values = rows[(rows.retention == FIFTH) & (rows.method == LOOKED)].set_index(["model", "dtype", "metric"]).value.to_dict()
    cases = [(model, dtype) for model in SHAPES for dtype in ("float32", "bfloat16")]
    whole = {case: sum(values.get((*case, STAGE + stage), 0.0) for stage in candidates.STAGES) for case in cases}

    def shares(stage: str, model: str) -> str:
        of = [(model, dtype) for dtype in ("float32", "bfloat16")]
        return " · ".join(f"{values.get((*case, STAGE + stage), 0.0) / whole[case]:.0%}" for case in of)

    used = [stage for stage in candidates.STAGES if any((*case, STAGE + stage) in values for case in cases)]
    lines = [[stage, *(shares(stage, model) for model in SHAPES)] for stage in used]
    header = ["float32 · bfloat16", *SHAPES.values()]
    (keys,), slower = rows.context_tokens.unique(), rows[rows.metric == "time with stages timed"].value
    n = f"{keys} keys, {FIFTH:.0%} of them, medians of {int(rows.n.max())} rounds of each stage; with clocks paths take "
    n += f"{slower.min():.2f} to {slower.max():.2f} times as long"
    return table(header, lines, "attention_stages_32768", n)


def looked_roofline() -> str:
    """The share of the machine's peak that products after a first look reach at 32768 keys; how many times as fast as the flat
    path `hierarchical` is, and would be if these products were at the peak and all else but spared heads took no time.
    """
    return _looked_roofline("attention_stages_32768", "attention_speed", {})


def looked_roofline_amx() -> str:
    """The same where tiles multiply bfloat16 and INT8."""
    return _looked_roofline("attention_stages_32768_amx", STAGES_AMX, {kind: f"{kind} tiles" for kind in ("bfloat16", "int8")})


def _looked_roofline(name: str, machine: str, tiles: Mapping[str, str]) -> str:
    """`tiles`: whose peak a kind of products has instead of torch's."""
    rows, speed = rows_of(name), rows_of(machine)
    peaks = speed[speed.method == "machine"].set_index("metric").value
    values = rows.set_index(["model", "dtype", "retention", "method", "metric"]).value.sort_index()
    first, cells = rows.iloc[0], {}
    for model, dtype, at in itertools.product(SHAPES, ("float32", "bfloat16"), sorted(rows.retention.dropna().unique())):
        looked, flat = (values[model, dtype, at, method] for method in (LOOKED, FLAT))
        kinds = {"attend together": (4, dtype), "estimate": (2, "int8")}  # operations a key, row and dimension
        heads, dim = rows.loc[rows.model == model, ["heads", "head_dim"]].iloc[0]
        pairs = pairs_of_blocks(first, heads, at) * dim
        at_peak = {stage: each * pairs / peaks[f"peak {tiles.get(of, of)}"] / 1e6 for stage, (each, of) in kinds.items()}
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
        shown = (" · ".join(cells[model, dtype, at][kind] for dtype in ("float32", "bfloat16")) for model in SHAPES)
        lines.append([f"{at:.0%} of the keys" if kind == "attend together" else "", said, *shown])
    header = ["", "float32 · bfloat16", *SHAPES.values()]
    n = f"{first.context_tokens} keys, medians of {int(rows.n.max())} rounds; products are of the keys that blocks let through"
    said = "the peaks" + (", of torch's products in float32, and of tiles" if tiles else "")
    return f"{table(header, lines, name, n)}\n\n{source(machine, said)}"
