"""Interleaved timing: candidates take turns, so that a noisy neighbour slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Timing:
    """Seconds a call took, over the rounds of one interleaved measurement."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds))

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile: the spread that is reported beside each median."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(low), float(high)


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, Timing]:
    """Times each candidate once a round, in turn; the first `warmup` rounds do not count, nor what is called `before` it.

    Every round of every call has another order, drawn anew, in which no candidate follows itself: what one leaves in the caches
    speeds up or slows down whoever comes next, and over many rounds each comes next to each.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    random, order = np.random.default_rng(), np.arange(len(candidates))
    calls = list(candidates.items())
    for round_ in range(warmup + rounds):
        last = order[-1] if round_ and len(order) > 1 else None
        order = random.permutation(order)
        while len(order) and order[0] == last:
            order = random.permutation(order)
        for index in order:
            name, call = calls[index]
            if before and name in before:
                before[name]()
            start = time.perf_counter()
            call()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def repeated(call: Callable[[], object], *, most: int, most_s: float) -> list[float]:
    """Seconds of each of at most `most` calls of one candidate, fewer where they take more than `most_s` together."""
    seconds: list[float] = []
    while len(seconds) < most and sum(seconds) < most_s:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def ratio(baseline: Timing, candidate: Timing) -> float:
    """How many times faster the candidate is: the median over rounds of the two times' quotient."""
    return float(np.median(np.divide(baseline.seconds, candidate.seconds)))
