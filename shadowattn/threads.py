"""How many threads a piece of work may use: one number that torch, the native kernels and OpenVINO's graphs all follow.

torch's number belongs to the calling thread, and the native kernels ask torch. OpenVINO's is compiled into a graph.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_budget = threading.local()


@contextmanager
def thread_budget(threads: int | None) -> Iterator[None]:
    """Work of the calling thread on at most `threads` cores; None leaves everything as it is."""
    if threads in (None, current_budget()):
        yield
        return
    outer = current_budget()
    before = torch.get_num_threads()  # asked first: it is what makes torch set this thread's number up, from a global one
    torch.set_num_threads(threads)
    _budget.threads = threads
    try:
        yield
    finally:
        _budget.threads = outer
        torch.set_num_threads(before)


def current_budget() -> int | None:
    """The calling thread's budget, or None where none was set."""
    return getattr(_budget, "threads", None)


def compile_hints() -> dict[str, int | bool]:
    """What a graph that runs on OpenVINO's CPU device is compiled with to keep within the budget.

    Unpinned, because stages overlap: pinned threads of a graph would sit on the very cores that selection and attention are on.
    """
    threads = current_budget()
    return {} if threads is None else {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
