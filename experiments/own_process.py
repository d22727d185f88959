"""What has to be measured in a process of its own: memory that was once used is rarely given back. Linux only, for the memory."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_all_start_methods, get_context, get_start_method, set_start_method
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TypeVar

import torch
import transformers

from shadowattn.errors import InputError
from shadowattn.machine import return_freed_memory

Result = TypeVar("Result")
_PROCESS = Path("/proc/self")


def in_own_process(measure: Callable[..., Result], *arguments: object) -> Result:
    """What a function of a module returns for `arguments`, in a fresh process with as many threads and the same environment.

    What libraries read of the environment when they are imported is that of the first call. Memory of the process counts what is
    imported, which it shares with others.
    """
    begun = torch.get_num_threads(), dict(os.environ)
    with ProcessPoolExecutor(1, fresh_processes(), initializer=_begin, initargs=begun) as pool:
        return pool.submit(measure, *arguments).result()


@cache
def fresh_processes() -> BaseContext:
    """Processes that hold nothing of this one. Each is forked off one that has imported what runs need and done nothing else, so
    that imports, which take seconds, are made once; where the system has no such processes, each imports anew.
    """
    known = get_all_start_methods()
    context = get_context("forkserver" if "forkserver" in known else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["experiments.job"])
    if get_start_method(allow_none=True) not in (None, *known):  # of joblib's workers: a new process is told it, and knows none
        set_start_method(context.get_start_method(), force=True)
    return context


def _begin(threads: int, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()


def check_memory(remedy: str) -> None:
    """Raises `InputError` where a process cannot tell its memory; `remedy` is the setting that does without."""
    if not (_PROCESS / "clear_refs").exists():
        raise InputError(f"memory: expected Linux's /proc/self/clear_refs, got none; {remedy}")


def peak_bytes(call: Callable[[], object]) -> int:
    """What a call needs at most beyond what the process holds before it. Raises `InputError` where the system does not tell."""
    if not begin_peak():
        raise InputError("memory: expected Linux's /proc/self/clear_refs, got none; measure on Linux")
    before = resident_bytes()
    call()
    return peak_resident_bytes() - before


def begin_peak() -> bool:
    """Gives freed memory back that the C library kept, and resets the mark that `peak_resident_bytes` reads; False where the
    system has none.
    """
    return_freed_memory()
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident_bytes() -> int:
    """The most memory of this process since `begin_peak`."""
    return _status("VmHWM")


def resident_bytes() -> int:
    """Memory of this process."""
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(one for one in (_PROCESS / "status").read_text().splitlines() if one.startswith(field))
    return 1024 * int(line.split()[1])
