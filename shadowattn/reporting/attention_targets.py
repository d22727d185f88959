"""The targets of attention's speed beside what its rows say, shape by shape: a pure function of rows."""

from dataclasses import dataclass

import pandas as pd
from rich.table import Table

from shadowattn.reporting.rows import with_graphs_named

_SDPA, _OWN = "times faster than sdpa", "times faster than own dense"
_TOTAL, _BLOCKS = "total (int8_fused), per row", "total (int8_fused), 32-row blocks, leading_query"


@dataclass(frozen=True)
class Target:
    """A target: at least `float32` and `bfloat16` (None: no target) of `metric`, or at most where `at_most`."""

    method: str
    metric: str
    float32: float
    bfloat16: float | None
    at_most: bool = False


TARGETS = (
    Target("attend, per row", _SDPA, 2.5, 4.5),
    Target("attend, 32-row blocks", _SDPA, 7, 11),
    Target("attend, 32-row blocks", _OWN, 4, 4),
    Target(_TOTAL, _SDPA, 2.2, 3.2),
    Target(_TOTAL, _OWN, 1.2, 1.2),
    Target(_BLOCKS, _SDPA, 4.5, 7),
    Target(_BLOCKS, _OWN, 2.5, 2.5),
    Target("select", "share of sdpa", 0.04, None, at_most=True),
    Target("total (hierarchical), per row", "peak beyond q, k, v and output", 256, 256, at_most=True),
    *(
        Target(f"total ({estimator}), {rows}", "peak beyond q, k, v and output", 256, 256, at_most=True)
        for estimator in ("int8_fused", "int8_graph")
        for rows in ("per row", "32-row blocks, leading_query")
    ),
)


def targets_table(rows: pd.DataFrame) -> Table:
    """A line for each target, a column for each shape and dtype in the rows of parts `chunk` and `memory`."""
    rows = with_graphs_named(rows[rows.part.isin(("chunk", "memory"))])
    cases = list(rows[["model", "dtype"]].drop_duplicates().itertuples(index=False, name=None))
    values = rows.set_index(["method", "metric", "model", "dtype"]).value.to_dict()
    table = Table("method", "metric", "target", *(f"{model} {dtype}" for model, dtype in cases), title="targets")
    for target in TARGETS:
        limits = {"float32": target.float32, "bfloat16": target.bfloat16}
        sign = "≤" if target.at_most else "≥"
        named = " or ".join(dict.fromkeys(f"{limit:g}" for limit in limits.values() if limit is not None))
        cells = [_cell(target, limits[dtype], values.get((target.method, target.metric, model, dtype))) for model, dtype in cases]
        table.add_row(target.method, target.metric, f"{sign} {named}", *cells)
    return table


def _cell(target: Target, limit: float | None, value: float | None) -> str:
    if value is None:
        return "not measured"
    if limit is None:
        return f"{value:.3g}"
    held = value <= limit if target.at_most else value >= limit
    return f"{value:.3g}" + ("" if held else " missed")
