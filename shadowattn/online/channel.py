"""A bounded queue between two stages that run at the same time."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any


class ClosedError(Exception):
    """The channel was closed: some stage failed, and all are to stop."""


class Channel:
    """Holds at most `capacity` items. Anyone may close it, and then no side of it waits any longer."""

    def __init__(self, capacity: int):
        self._capacity, self._items = capacity, deque()
        self._changed = threading.Condition()
        self._ended = self._closed = False

    def feed(self, items: Iterable[Any]) -> None:
        """Passes everything on, waiting for room, and ends the stream. Raises `ClosedError` as soon as the channel is closed."""
        for item in items:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
                self._check()
                self._items.append(item)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        """What the other side feeds, until it ends. Raises `ClosedError` as soon as the channel is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ended or self._items)
                self._check()
                if not self._items:
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item

    def close(self) -> None:
        """Stops both sides, at whatever they wait for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError
