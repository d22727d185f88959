"""Work that passes beside the engine's own: the next layer's lists, made while this layer attends."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shadowattn.engine.clock import Clock
from shadowattn.threads import thread_budget

AHEAD_STAGES = _RANKING, _WAITING = "lists ahead", "waiting for lists"


class Ahead:
    """One piece of work at a time in a thread that lives until the block is left; without work there is no thread.

    The work has one core: the others are the attention's that passes beside it. Where an estimator's graphs run on another device
    it needs none.
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
        self._begun = self._pool.submit(_timed, work, torch.is_inference_mode_enabled())

    def result(self, clock: Clock) -> Any:
        """What the work gave, or None where none was begun; an error in it is raised here."""
        if self._begun is None:
            return None
        with clock(_WAITING):
            made, seconds = self._begun.result()
        self._begun = None
        clock.add(_RANKING, seconds)
        return made


def _timed(work: Callable[[], Any], inference: bool) -> tuple[Any, float]:
    began = time.perf_counter()
    with thread_budget(1), torch.inference_mode(inference):
        return work(), time.perf_counter() - began
