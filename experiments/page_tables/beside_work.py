"""Attention beside other programs."""

from experiments.page_tables.common import rows_of, source, table

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
