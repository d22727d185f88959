"""Comparisons of methods as rows: `gain_over_RIVAL` by loss, `closer_than_RIVAL` by divergence from dense attention, and the same
with `_error`, `_low`, `_high` and `_p` after it."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from shadowattn.evaluation.comparison import compare
from shadowattn.reporting.rows import Row
from shadowattn.reporting.verdicts import PREFIXES

_FIELDS = {"": "difference", "_error": "error", "_low": "low", "_high": "high", "_p": "p"}


def comparison_rows(
    rows: Mapping[Hashable, Row],
    losses: Mapping[Hashable, Sequence[float]],
    pairs: Sequence[tuple[Hashable, Hashable]],
    *,
    flags: Mapping[tuple[Hashable, Hashable], str] | None = None,
    by: str = "loss",
) -> list[Row]:
    """Five rows for each pair (method, rival), filled in as the method's row in `rows`; n counts windows.

    `losses` are what `by` says, of each window in nat. The p-values are corrected over all `pairs`, so a study calls this once
    for each `by`. `flags` names pairs that a reader should be wary of.
    """
    gain_rows = []
    for pair, comparison in zip(pairs, compare(losses, pairs), strict=True):
        method, rival = pair
        row = replace(rows[method], n=comparison.n, flag=(flags or {}).get(pair, ""))
        for ending, name in _FIELDS.items():
            metric, unit = f"{PREFIXES[by]}{rows[rival].method}{ending}", "1" if ending == "_p" else "nat"
            gain_rows.append(replace(row, metric=metric, value=vars(comparison)[name], unit=unit))
    return gain_rows
