"""Whether two methods differ, or their windows merely fell so: paired differences, corrected for how many are asked at once.

Every method runs on the same windows, so a comparison takes the difference window by window and what windows have in common
drops out. Its p-value is that of the two-sided sign-flip permutation test of the mean (Fisher): under the null hypothesis a
difference is as likely to have the other sign. Nothing is assumed of the shape of its distribution; windows count as
independent. A study that makes many comparisons corrects all of one kind together by Holm's method, which bounds the chance of a
single false "better" or "worse" among them by `LEVEL`; those by loss are one kind, those by divergence another.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

LEVEL = 0.05
_EXACT_WINDOWS = 16  # up to here all sign patterns are tried, 65,536 of them
_DRAWS = 99_999  # beyond, as many drawn ones


@dataclass(frozen=True)
class Comparison:
    """What a method gains over a rival on the same `n` windows: the rival's loss less its own, in nat.

    `difference` is the mean, `error` its standard error, `low` and `high` its 95 % t interval, which is this comparison's
    alone; all three are nan for a single window. `p` is corrected over all comparisons that were made together.
    """

    n: int
    difference: float
    error: float
    low: float
    high: float
    p: float


def compare(losses: Mapping[Hashable, Sequence[float]], pairs: Sequence[tuple[Hashable, Hashable]]) -> list[Comparison]:
    """A comparison for each pair (method, rival), Holm-corrected together; `losses` in nat, window by window.

    Raises `ValueError` where a method was measured on another number of windows than its rival, or a loss is not finite.
    """
    gains = [np.subtract(*_paired(losses[rival], losses[method])) for method, rival in pairs]
    corrected = holm([sign_flip_p(gain) for gain in gains])
    return [replace(_interval(gain), p=p) for gain, p in zip(gains, corrected, strict=True)]


def _paired(first: Sequence[float], second: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    if len(first) != len(second) or not len(first):
        raise ValueError(f"paired values: expected the same windows for both methods, got {len(first)} and {len(second)}")
    pair = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if not np.isfinite(pair).all():
        raise ValueError("paired values: expected finite ones, got NaN or infinity; nothing can be said of such a method")
    return pair


def _interval(gains: np.ndarray) -> Comparison:
    mean, n = float(gains.mean()), len(gains)
    if n == 1:
        return Comparison(n, mean, math.nan, math.nan, math.nan, math.nan)
    error = float(gains.std(ddof=1) / n**0.5)
    reach = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error
    return Comparison(n, mean, error, mean - reach, mean + reach, math.nan)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of a mean of 0: the share of sign patterns whose mean lies at least as far from 0 as the given one.

    Exact up to 16 differences other than 0; beyond that of drawn patterns, the given one among them, the same ones each time.
    """
    values = np.abs(np.asarray(differences, np.float64))
    values = values[values > 0]  # the sign of no difference flips nothing
    exact = len(values) <= _EXACT_WINDOWS
    if exact:
        flipped = (np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1
    else:
        flipped = np.random.default_rng(0).integers(0, 2, (_DRAWS, len(values)), dtype=np.int8)
    # Sums that are equal but for their order of summation are equal: rounding grows with the terms, which may cancel out.
    reached = abs(float(np.sum(differences))) - 1e-12 * float(values.sum())
    extreme = int((np.abs((1 - 2 * flipped) @ values) >= reached).sum())
    return extreme / len(flipped) if exact else (1 + extreme) / (1 + _DRAWS)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number by Holm's step-down method, in the given order."""
    values = np.asarray(p_values, np.float64)
    order = np.argsort(values, kind="stable")
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(1, np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)))
    return corrected.tolist()


def verdict(difference: float, p: float, *, n: int, comparisons: int) -> str:
    """`better`, `worse` or `no difference shown` at level 5 %; `too few windows` where no data could have shown one."""
    least = 2.0 ** (1 - n) if n <= _EXACT_WINDOWS else 1 / (1 + _DRAWS)
    if least * comparisons > LEVEL:
        return "too few windows"
    if p > LEVEL:
        return "no difference shown"
    return "better" if difference > 0 else "worse"
