"""How far a measured figure may be from the one it estimates: 95 % intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from shadowattn.errors import InputError

_LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure of `n` windows, rows or documents, and the ends of its 95 % interval, in the figure's unit."""

    value: float
    low: float
    high: float
    n: int


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of independent values and Student's interval. Raises `InputError` on fewer than two values."""
    if len(values) < 2:
        raise InputError(f"interval: expected at least 2 windows or rows, got {len(values)}; measure more")
    mean, error = float(np.mean(values)), float(stats.sem(values))
    half = float(stats.t.ppf((1 + _LEVEL) / 2, len(values) - 1)) * error
    return Interval(mean, mean - half, mean + half, len(values))


def bootstrap_interval(values: Sequence[float], *, resamples: int = 9999, seed: int = 0) -> Interval:
    """The mean of independent values, and the percentile interval of its bootstrap (Efron, Annals of Statistics 7, 1979).

    Of differences window by window it is the paired bootstrap of the difference of two means. The same resamples each time. With
    few values it is too short: of 8 by about a quarter beside Student's. Raises `InputError` on fewer than two values.
    """
    if len(values) < 2:
        raise InputError(f"interval: expected at least 2 windows or rows, got {len(values)}; measure more")
    found = stats.bootstrap(
        (np.asarray(values, np.float64),), np.mean, confidence_level=_LEVEL, n_resamples=resamples, method="percentile",
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    ends = found.confidence_interval
    return Interval(float(np.mean(values)), float(ends.low), float(ends.high), len(values))


def share_interval(hits: int, count: int, *, method: Literal["wilson", "exact"] = "wilson") -> Interval:
    """The share of hits, with Wilson's interval, or Clopper and Pearson's exact one, which is longer and never too short."""
    if count < 1:
        raise InputError("interval: expected at least 1 document, got none; measure more")
    ends = stats.binomtest(hits, count).proportion_ci(_LEVEL, method=method)
    return Interval(hits / count, float(ends.low), float(ends.high), count)


def paired_share_interval(hits: Sequence[bool], others: Sequence[bool]) -> Interval:
    """The share of hits less that of the others on the same documents, and Agresti and Min's interval for matched pairs.

    (Statistics in Medicine 24, 2005: half a document more in each of the four cells.) Unlike Student's it has a length where no
    document differs. Raises `InputError` on fewer than two documents.
    """
    pairs = list(zip(hits, others, strict=True))
    count, more, fewer = len(pairs), sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    if count < 2:
        raise InputError(f"interval: expected at least 2 documents, got {count}; measure more")
    middle = (more - fewer) / (count + 2)
    error = (more + fewer + 1 - (more - fewer) ** 2 / (count + 2)) ** 0.5 / (count + 2)
    half = float(stats.norm.ppf((1 + _LEVEL) / 2)) * error
    return Interval((more - fewer) / count, max(-1.0, middle - half), min(1.0, middle + half), count)


def resampled_largest_to_median(increases: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """The largest mean of heads [H, W] over their median mean, and the interval from `resamples` resamples of the W windows.

    Infinite where the median is not above zero and the largest is.
    """
    windows = increases.shape[1]
    if windows < 2:
        raise InputError(f"interval: expected at least 2 windows, got {windows}; set importance.windows")
    counts = np.random.default_rng(seed).multinomial(windows, np.full(windows, 1 / windows), size=resamples)
    low, high = np.quantile(_ratio(increases @ counts.T), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], method="nearest")
    return Interval(float(_ratio(increases.sum(1))), float(low), float(high), windows)


def _ratio(sums: np.ndarray) -> np.ndarray:
    """Largest over median along the heads, the first axis."""
    largest, median = sums.max(0), np.median(sums, axis=0)
    return np.where(median > 0, largest / np.where(median > 0, median, 1), np.where(largest > 0, np.inf, 0.0))
