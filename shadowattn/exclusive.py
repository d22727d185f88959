"""One piece of work at a time on what several calls share: the memory of a bank's graphs, packed keys, counters.

A piece of work is a thread, together with the threads that it starts to work for it (`working_for`).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


def current_work() -> object:
    """The piece of work that the calling thread belongs to; its own where nobody said otherwise."""
    if not hasattr(_thread, "work"):
        _thread.work = object()
    return _thread.work


@contextmanager
def working_for(work: object) -> Iterator[None]:
    """The calling thread belongs to another's piece of work until left: what that work holds, this thread may use."""
    before, _thread.work = current_work(), work
    try:
        yield
    finally:
        _thread.work = before


class Exclusive:
    """Lets one piece of work in at a time; others wait. The same work may enter again. A copy is a new one that nobody holds."""

    def __init__(self):
        self._lock = threading.Lock()
        self._holder: object | None = None

    @contextmanager
    def use(self) -> Iterator[bool]:
        """Holds it until left. Yields whether this is the work's outermost use.

        When the outermost use ends, other work may overwrite what is shared; a result that leaves it must therefore be a copy.
        """
        work = current_work()
        if self._holder is work:  # only this very work can have set it so
            yield False
            return
        with self._lock:
            try:
                self._holder = work
                yield True
            finally:
                self._holder = None

    def __reduce__(self):
        return Exclusive, ()
