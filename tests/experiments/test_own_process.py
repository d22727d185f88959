"""What is measured in a process of its own."""

import os
import sys

import pytest
import torch
from joblib import Parallel, delayed

from experiments import own_process
from experiments.own_process import check_memory, in_own_process, peak_bytes
from shadowattn.errors import InputError


def where(value: int) -> tuple[int, int, int]:
    return value, os.getpid(), torch.get_num_threads()


def measured_peak(size: int) -> int:
    """After an earlier peak, of three times the size."""
    torch.ones(3 * size, dtype=torch.int8)
    return peak_bytes(lambda: torch.ones(size, dtype=torch.int8))


def measured_small_pieces(size: int) -> int:
    """After as many bytes in pieces that the C library keeps when they are freed."""

    def pieces() -> None:
        [torch.ones(1 << 14, dtype=torch.int8) for _ in range(size >> 14)]

    pieces()
    return peak_bytes(pieces)


def refuse() -> None:
    raise InputError("refused there")


def test_it_is_another_process_with_as_many_threads():
    value, process, threads = in_own_process(where, 5)
    assert value == 5
    assert process != os.getpid()
    assert threads == torch.get_num_threads()


def test_a_worker_of_joblib_has_one_too():
    """As a job of a sweep by Hydra's joblib launcher, whose workers know a way to start processes that others do not."""
    done = Parallel(n_jobs=2)(delayed(in_own_process)(where, value) for value in (1, 2))
    assert [value for value, *_ in done] == [1, 2]


def found(name: str) -> tuple[str | None, bool]:
    return os.environ.get(name), "experiments.job" in sys.modules


def test_it_has_the_environment_of_the_call_and_the_imports_of_a_run(monkeypatch):
    for value in ("first", "second"):
        monkeypatch.setenv("SHADOWATTN_OF_THIS_TEST", value)
        assert in_own_process(found, "SHADOWATTN_OF_THIS_TEST") == (value, True)


def test_its_errors_come_back():
    with pytest.raises(InputError, match="refused there"):
        in_own_process(refuse)


def test_a_peak_counts_what_was_given_back_and_no_earlier_peak():
    size = 1 << 26
    assert 0.9 * size < in_own_process(measured_peak, size) < 2 * size


def test_a_peak_counts_what_the_c_library_kept():
    size = 1 << 26
    assert in_own_process(measured_small_pieces, size) > 0.9 * size


def test_a_system_that_does_not_tell_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(own_process, "_PROCESS", tmp_path)
    with pytest.raises(InputError, match=r"expected Linux's /proc/self/clear_refs, got none; leave it out"):
        check_memory("leave it out")
