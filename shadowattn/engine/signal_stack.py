"""Keeps the stack on which signals are handled.

After a forward pass the calling thread was found with another one (`sigaltstack`, seen with OpenVINO 2026.4.1), whose memory
went with the graphs: a signal then, such as Ctrl-C, ended the process.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_LIBC = ctypes.CDLL(None) if hasattr(ctypes, "CDLL") and not hasattr(ctypes, "WinDLL") else None
_BYTES = 64  # of stack_t, on every system that has one; its fields are handed back as they were


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """On leaving, the calling thread handles signals where it did before. Nothing where a system has no such stacks."""
    if _LIBC is None or not hasattr(_LIBC, "sigaltstack"):
        yield
        return
    before = ctypes.create_string_buffer(_BYTES)
    known = _LIBC.sigaltstack(None, before) == 0
    try:
        yield
    finally:
        if known:
            _LIBC.sigaltstack(before, None)
