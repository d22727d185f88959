"""Threads that live as long as a call: when it is over none is at work, whatever interrupted it."""

import _thread
from collections.abc import Callable


class Workers:
    """Starts threads, and waits for them.

    Not made of `threading.Thread`: an interrupted `start` may leave its thread waiting for ever, and an interrupted `join` takes
    a running thread for one that has ended (CPython 3.11). Here each step is one call that an interruption comes before or after.
    """

    def __init__(self):
        self._lock = _thread.allocate_lock()
        self._over = False
        self._at_work: list[_thread.LockType] = []  # a lock for each thread, free when it has ended

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work`, which raises nothing, in a thread of its own; not at all where the wait was first."""
        _thread.start_new_thread(self._run, (work,))

    def wait(self, close: Callable[[], None]) -> list[BaseException]:
        """Returns when nothing is at work and nothing will be, and with it the interruptions that came meanwhile.

        `close` ends whatever the threads wait for. It is called here, since an interruption may have come before any other call.
        """
        interruptions = []
        while True:
            try:  # around the loop too: CPython takes up an interruption where a loop jumps back, outside of the `try` within
                while True:
                    try:
                        close()
                        with self._lock:
                            self._over = True
                        for at_work in self._at_work:
                            with at_work:
                                pass
                        return interruptions
                    except BaseException as error:
                        interruptions += [error]  # no call, after which CPython would take up the next interruption
            except BaseException as error:
                interruptions += [error]

    def _run(self, work: Callable[[], None]) -> None:
        ended = _thread.allocate_lock()
        with self._lock:
            if self._over:
                return
            ended.acquire()
            self._at_work.append(ended)
        try:
            work()
        finally:
            ended.release()
