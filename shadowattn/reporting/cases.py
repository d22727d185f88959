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
    metric_rows = _with_intervals(_of_models(rows[rows.metric.isin(metrics)]), rows)
    cases: list[str] = []
    for column in metric_rows.columns.difference(_NO_CASES, sort=False):
        count = metric_rows.groupby([*KEYS, "metric", *cases], dropna=False).ngroups
        if metric_rows.groupby([*KEYS, "metric", *cases, column], dropna=False).ngroups > count:
            cases.append(column)
    pooled = []
    while cases and metric_rows.groupby(cases, dropna=False).ngroups > most:
        pooled.append(max(cases, key=lambda column: metric_rows[column].nunique()))
        cases.remove(pooled[-1])
    keys = [*KEYS, *cases, "metric"]
    if metric_rows.duplicated(keys).any():
        pooled = pooled or ["repetition"]
        metric_rows = metric_rows.assign(low=float("nan"), high=float("nan"))
    how = {"value": "median", "low": "median", "high": "median", "unit": "first", "n": "first"}
    return Cells(metric_rows.groupby(keys, sort=False, dropna=False).agg(how).reset_index(), cases, pooled)


def _of_models(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the rows about single layers and heads, of metrics that have others too."""
    for column in {"layer", "head"} & set(rows.columns):
        whole = rows[column] < 0
        rows = rows[whole | ~rows.metric.isin(rows.metric[whole].unique())]
    return rows


def _with_intervals(metric_rows: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """`low` and `high` by the rows' own columns, or by rows of the metrics NAME_low and NAME_high, or NAME_error."""
    columns = [column for column in rows.columns if column not in _NO_CASES - set(KEYS)]
    places = pd.MultiIndex.from_frame(metric_rows[[*columns, "metric"]].astype(str))

    def beside(ending: str) -> pd.Series:
        others = rows[rows.metric.isin(metric_rows.metric + ending)]
        names = others.assign(metric=others.metric.str.removesuffix(ending))[[*columns, "metric"]].astype(str)
        ends = pd.Series(others.value.to_numpy(), pd.MultiIndex.from_frame(names))
        return pd.Series(ends[~ends.index.duplicated()].reindex(places).to_numpy(), metric_rows.index)

    errors = beside("_error")
    low, high = (metric_rows.value - errors).fillna(beside("_low")), (metric_rows.value + errors).fillna(beside("_high"))
    if {"low", "high"} <= set(metric_rows.columns):
        spread = metric_rows.high > metric_rows.low  # rows of a single value have both ends there
        low, high = low.fillna(metric_rows.low.where(spread)), high.fillna(metric_rows.high.where(spread))
    return metric_rows.assign(low=low, high=high)
