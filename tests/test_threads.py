"""A thread budget holds for torch and for graphs compiled under it, in its own thread only."""

import threading

import torch

from shadowattn.threads import compile_hints, current_budget, thread_budget


def test_a_budget_ends_with_its_block():
    before = torch.get_num_threads()
    assert compile_hints() == {}
    with thread_budget(1):
        assert torch.get_num_threads() == 1
        assert compile_hints()["INFERENCE_NUM_THREADS"] == 1
        with thread_budget(2), thread_budget(None):
            assert torch.get_num_threads() == current_budget() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    assert current_budget() is None


def test_a_budget_is_the_threads_own():
    seen = []

    def work():
        with thread_budget(3):
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [3]
    assert torch.get_num_threads() == before
    assert current_budget() is None
