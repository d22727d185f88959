"""Peak memory of attention."""

from collections.abc import Mapping

import pandas as pd

from experiments.page_tables.common import SHAPES, one, rows_of, source, table


def peak_memory() -> str:
    """Peak memory of every path at 32k keys; of short chunks, and with AMX, the largest of all shapes."""
    others = {"memory_32k_128": "128 rows", "memory_32k_amx": "with AMX"}
    return _peak_memory("memory_32k", _MEMORY_TARGET_MB, others, "memory_32k_looked")


def peak_memory_128k() -> str:
    """The same at 128k keys."""
    return _peak_memory("memory_128k", _LONG_MEMORY_TARGET_MB, {}, "memory_128k_looked")


def _peak_memory(name: str, target: float, others: Mapping[str, str], more: str) -> str:
    """`others`: files of other runs, and what each is called, of whose cases the largest peak is shown. `more`: the file of a run
    of further paths.
    """
    rows, later = rows_of(name), rows_of(more)
    later = later[~later.method.isin(rows.method)]
    rows, sources = pd.concat([rows, later]), [source(more, " and ".join(later.method.unique()))]
    cases = list(dict.fromkeys(zip(rows.model, rows.dtype, strict=True)))

    def shown(value: float) -> str:
        return f"{value:.0f}" if value <= target else f"**{value:.0f}**"

    lines = [
        [method, *(shown(one(rows, method=method, model=model, dtype=dtype)) for model, dtype in cases)]
        for method in dict.fromkeys(rows.method)
    ]
    header = ["MB beyond q, k, v and output", *(f"{SHAPES[model]} {dtype}" for model, dtype in cases)]
    of = f"chunks of {int(rows.chunk_rows.max())} rows, {int(rows.context_tokens.iloc[0])} keys, one run each"
    of += "; empty: not in that run" if others else ""
    notes = f"{of}; above the target of {target} MB in bold"
    for other, words in others.items():
        rows = rows_of(other)
        most, height = rows.groupby("method").value.max(), int(rows.chunk_rows.max())
        lines = [[*line, shown(most[line[0]]) if line[0] in most else ""] for line in lines]
        header.append(f"{words}, largest")
        keys = int(rows.context_tokens.iloc[0])
        sources.append(source(other, f"chunks of {height} rows, {keys} keys, the largest of the eight cases"))
    return "\n\n".join([table(header, lines, name, notes), *sources])


_MEMORY_TARGET_MB, _LONG_MEMORY_TARGET_MB = 256, 1000
