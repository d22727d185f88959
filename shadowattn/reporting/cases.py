"""One value of a metric for each job of a sweep, method and retention, and for each case that a study distinguishes."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

KEYS = ["job", "method", "retention"]
# What a row says of its value, and what says where it is from: no case of a study.
_NO_CASES = frozenset(
    (
        *("experiment", "config_hash", "metric", "value", "unit", "n", "seed", "path_kind", "measured", "flag", "low", "high"),
        *("published", "number", "start", "bytes", "corpus_sha256", "processor", "threads", "versions", *KEYS),
    )
)


@dataclass(frozen=True)
class Cells:
    """`values` has the columns job, method, retention, `cases`, metric, value, low, high, unit and n.

    `low` and `high` are the ends of an interval, NaN where rows have none. A value is the median over the columns `pooled`.
    """

    values: pd.DataFrame
    cases: list[str]
    pooled: list[str]


def cells(rows: pd.DataFrame, metrics: Sequence[str], most: int) -> Cells:
    """The values of some metrics, in at most `most` cases.

    Cases are told apart by the columns that differ between rows of one job, method, retention and metric. Where there are too
    many, the column with most values is pooled, and so on.
    """
    of = _with_intervals(_of_models(rows[rows.metric.isin(metrics)]), rows)
    cases: list[str] = []
    for column in of.columns.difference(_NO_CASES, sort=False):
        known = of.groupby([*KEYS, "metric", *cases], dropna=False).ngroups
        if of.groupby([*KEYS, "metric", *cases, column], dropna=False).ngroups > known:
            cases.append(column)
    pooled = []
    while cases and of.groupby(cases, dropna=False).ngroups > most:
        pooled.append(max(cases, key=lambda column: of[column].nunique()))
        cases.remove(pooled[-1])
    keys = [*KEYS, *cases, "metric"]
    if of.duplicated(keys).any():
        pooled = pooled or ["repetition"]
        of = of.assign(low=float("nan"), high=float("nan"))
    how = {"value": "median", "low": "median", "high": "median", "unit": "first", "n": "first"}
    return Cells(of.groupby(keys, sort=False, dropna=False).agg(how).reset_index(), cases, pooled)


def _of_models(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the rows about single layers and heads, of metrics that have others too."""
    for column in {"layer", "head"} & set(rows.columns):
        whole = rows[column] < 0
        rows = rows[whole | ~rows.metric.isin(rows.metric[whole].unique())]
    return rows


def _with_intervals(of: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """`low` and `high` by the rows' own columns, or by rows of the metrics NAME_low and NAME_high, or NAME_error."""
    own = [column for column in rows.columns if column not in _NO_CASES - set(KEYS)]
    places = pd.MultiIndex.from_frame(of[[*own, "metric"]].astype(str))

    def beside(ending: str) -> pd.Series:
        others = rows[rows.metric.isin(of.metric + ending)]
        names = others.assign(metric=others.metric.str.removesuffix(ending))[[*own, "metric"]].astype(str)
        found = pd.Series(others.value.to_numpy(), pd.MultiIndex.from_frame(names))
        return pd.Series(found[~found.index.duplicated()].reindex(places).to_numpy(), of.index)

    errors = beside("_error")
    low, high = (of.value - errors).fillna(beside("_low")), (of.value + errors).fillna(beside("_high"))
    if {"low", "high"} <= set(of.columns):
        spread = of.high > of.low  # rows of a single value have both ends there
        low, high = low.fillna(of.low.where(spread)), high.fillna(of.high.where(spread))
    return of.assign(low=low, high=high)
