"""The targets of attention's speed beside what its rows say, shape by shape: a pure function of rows."""

from dataclasses import dataclass

import pandas as pd
from rich.table import Table

_SDPA, _OWN = "times faster than sdpa", "times faster than own dense"
_TOTAL, _BLOCKS = "total (int8_fused), per row", "total (int8_fused), 32-row blocks, leading_query"


@dataclass(frozen=True)
class Bar:
    """A target: at least `float32` and `bfloat16` (None: no target) of `metric`, or at most where `at_most`."""

    method: str
    metric: str
    float32: float
    bfloat16: float | None
    at_most: bool = False


BARS = (
    Bar("attend, per row", _SDPA, 2.5, 4.5),
    Bar("attend, 32-row blocks", _SDPA, 7, 11),
    Bar("attend, 32-row blocks", _OWN, 4, 4),
    Bar(_TOTAL, _SDPA, 2.2, 3.2),
    Bar(_TOTAL, _OWN, 1.2, 1.2),
    Bar(_BLOCKS, _SDPA, 4.5, 7),
    Bar(_BLOCKS, _OWN, 2.5, 2.5),
    Bar("select", "share of sdpa", 0.06, None, at_most=True),
    *(
        Bar(f"total ({estimator}), {rows}", "peak beyond q, k, v and output", 256, 256, at_most=True)
        for estimator in ("int8_fused", "int8")
        for rows in ("per row", "32-row blocks, leading_query")
    ),
)


def bars_table(rows: pd.DataFrame) -> Table:
    """A line for each target, a column for each shape and dtype in the rows of parts `bars` and `memory`."""
    rows = rows[rows.part.isin(("bars", "memory"))]
    cases = list(rows[["model", "dtype"]].drop_duplicates().itertuples(index=False, name=None))
    values = rows.set_index(["method", "metric", "model", "dtype"]).value.to_dict()
    made = Table("method", "metric", "bar", *(f"{model} {dtype}" for model, dtype in cases), title="bars")
    for bar in BARS:
        targets = {"float32": bar.float32, "bfloat16": bar.bfloat16}
        sign = "≤" if bar.at_most else "≥"
        named = " or ".join(dict.fromkeys(f"{target:g}" for target in targets.values() if target is not None))
        cells = [_cell(bar, targets[dtype], values.get((bar.method, bar.metric, model, dtype))) for model, dtype in cases]
        made.add_row(bar.method, bar.metric, f"{sign} {named}", *cells)
    return made


def _cell(bar: Bar, target: float | None, value: float | None) -> str:
    if value is None:
        return "not measured"
    if target is None:
        return f"{value:.3g}"
    held = value <= target if bar.at_most else value >= target
    return f"{value:.3g}" + ("" if held else " missed")
