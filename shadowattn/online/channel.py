"""A bounded queue between two stages that run at the same time."""

from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any

_END = object()


class ClosedError(Exception):
    """The channel was closed: some stage failed, and all are to stop."""


class Channel:
    """Holds at most `capacity` items, for one side that feeds and one that iterates. Anyone may close it, and then neither waits.
    With a capacity of 0 an item is passed on when the other side asks for it.

    Made of the one queue whose calls an interruption cannot leave half done.
    """

    def __init__(self, capacity: int):
        self._items, self._room = SimpleQueue(), SimpleQueue()
        for _ in range(capacity):
            self._room.put(None)
        self._closed = False

    def feed(self, items: Iterable[Any]) -> None:
        """Passes everything on, waiting for room, and ends the stream. Raises `ClosedError` as soon as the channel is closed.

        Of a closed channel not even the first item is asked for.
        """
        self._check()
        for item in items:
            self._room.get()
            self._check()
            self._items.put(item)
            del item  # which may be large, and would live while the next one is made
        self._items.put(_END)

    def __iter__(self) -> Iterator[Any]:
        """What the other side feeds, until it ends. Raises `ClosedError` as soon as the channel is closed."""
        while True:
            self._check()
            self._room.put(None)  # for what it waits for: a capacity counts what nobody has asked for yet
            item = self._items.get()
            self._check()
            if item is _END:
                return
            held = [item]
            del item
            yield held.pop()  # whoever iterates is the only one to hold it

    def close(self) -> None:
        """Stops both sides, at whatever they wait for."""
        self._closed = True
        self._room.put(None)
        self._items.put(_END)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError
