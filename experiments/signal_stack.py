"""The memory on which a thread handles signals, kept as it is while a library builds or drops what replaces it.

openvino-genai 2026.4 gives the thread that builds or drops a pipeline a signal stack of its own and unmaps it later. The next
Ctrl-C would then end the process with a segmentation fault, where Python handles signals on such a stack (`faulthandler`).
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class _Stack(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Gives the calling thread the signal stack back that it had; nothing on other systems than Linux."""
    if sys.platform != "linux":
        yield
        return
    stack = signal_stack()
    try:
        yield
    finally:
        ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None)


def signal_stack() -> _Stack:
    """The calling thread's, on Linux."""
    stack = _Stack()
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
    return stack


class Kept(Generic[T]):
    """What `build` makes, built and dropped with the signal stack kept."""

    def __init__(self, build: Callable[[], T]):
        with signal_stack_kept():
            self.built: T | None = build()

    def __del__(self):
        with signal_stack_kept():
            self.built = None
