"""Work that passes beside the engine's own: the next layer's lists, made while this layer attends."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shadowattn.engine.clock import Clock

# The first passes beside the engine's other stages.
AHEAD_STAGES = BESIDE, _WAITING = "lists ahead", "waiting for lists"


class Ahead:
    """One piece of work at a time in a thread that lives until the block is left; without work there is no thread.

    The work computes on one thread, while attention beside it takes all of its own; graphs of an estimator run as they were
    compiled. On another device they need none of these cores.
    """

    def __enter__(self) -> "Ahead":
        self._pool: ThreadPoolExecutor | None = None
        self._begun: Future | None = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def begin(self, work: Callable[[], Any]) -> None:
        """Begins a piece of work; its result is to be asked for before the next."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "shadowattn-ahead")
        self._begun = self._pool.submit(_timed, work, time.perf_counter())

    def result(self, clock: Clock) -> Any:
        """What the work gave, or None where none was begun; an error in it is raised here."""
        if self._begun is None:
            return None
        with clock(_WAITING):
            made, seconds = self._begun.result()
        self._begun = None
        clock.add(BESIDE, seconds)
        return made


def _timed(work: Callable[[], Any], began: float) -> tuple[Any, float]:
    """What the work gave, and the seconds since it was begun."""
    threads = torch.get_num_threads()  # asked first: it is what makes torch set this thread's number up, from a global one
    torch.set_num_threads(1)  # no budget: that would have an estimator's graphs compiled again, for one thread
    try:
        return work(), time.perf_counter() - began
    finally:
        torch.set_num_threads(threads)
