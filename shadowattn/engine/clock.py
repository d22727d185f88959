"""Where the engine's seconds go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds the seconds inside `with clock(stage):` to a table, by the stage's name."""

    def __init__(self, stages: dict[str, float]):
        self._stages = stages

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.add(stage, time.perf_counter() - began)

    def add(self, stage: str, seconds: float) -> None:
        """Seconds that were measured elsewhere."""
        self._stages[stage] = self._stages.get(stage, 0.0) + seconds
