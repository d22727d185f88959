"""Torch's operators alone between kernels: for the calling thread only, undone afterwards, and the kernels keep their threads."""

import threading

import pytest
import torch

from shadowattn.errors import InputError
from shadowattn.kernels import native
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.executor import Threads, run_batched
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from tests.tensors import qkv


def share_openmp() -> bool:
    """Whether the kernels and torch have one OpenMP, so that a number set by one is the other's."""
    if native.library() is None:
        return False
    torch.get_num_threads()  # makes torch set its number up, which it would do after ours
    before = native.library().shadowattn_set_threads(3)
    try:
        return torch.get_num_threads() == 3
    finally:
        native.library().shadowattn_set_threads(before)


pytestmark = pytest.mark.skipif(not share_openmp(), reason="no native kernels, or none that share torch's OpenMP")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_torch_is_alone_within_and_kernels_are_not(two_threads):
    with native.alone():
        assert (torch.get_num_threads(), native.threads()) == (1, 2)
        with native.alone():
            assert (torch.get_num_threads(), native.threads()) == (1, 2)
        assert (torch.get_num_threads(), native.threads()) == (1, 2)
        found = []
        other = threading.Thread(target=lambda: found.append((torch.get_num_threads(), native.threads())))
        other.start()
        other.join()
        assert found == [(2, 2)]  # a thread that begins meanwhile has torch's number
    assert (torch.get_num_threads(), native.threads()) == (2, 2)
    with pytest.raises(KeyError), native.alone():
        raise KeyError
    assert (torch.get_num_threads(), native.threads()) == (2, 2)


@pytest.mark.parametrize("query_block", [1, 8])
def test_only_what_the_kernels_compute_runs_so(two_threads, query_block):
    """Beside other estimators torch has large products to make; and a stage with threads of its own keeps them."""
    q, k, v = qkv(4, 2, 16, 40, 64)
    seen = []

    class Watched(Int8Fused):
        def _count_clipped(self, chunk):
            seen.append((torch.get_num_threads(), native.threads()))
            return super()._count_clipped(chunk)

    def ran(estimator, threads=Threads()):  # noqa: B008 - frozen
        seen.clear()
        chunk = Chunk.of(q, k, v, retention=0.5, scale=0.125)
        run_batched(Stages(chunk, Parts(estimator, Rule(query_block), NativeKernels())), threads=threads, keep_lists=False)
        return set(seen)

    fused = Int8Fused.of(q, k)
    assert ran(Watched(q_scales=fused.q_scales, k_scales=fused.k_scales)) == {(1, 2)}
    own = Threads(estimate=1, select=1, attend=2)
    assert (1, 2) not in ran(Watched(q_scales=fused.q_scales, k_scales=fused.k_scales), own)

    class Exact(Oracle):
        def scores(self, chunk):
            seen.append((torch.get_num_threads(), native.threads()))
            return super().scores(chunk)

    assert ran(Exact()) == {(2, 2)}

    class OwnScores(Int8Fused):
        def scores(self, chunk):
            seen.append((torch.get_num_threads(), native.threads()))
            return Oracle().scores(chunk)

    assert ran(OwnScores(q_scales=fused.q_scales, k_scales=fused.k_scales)) == {(2, 2)}


def test_nothing_is_left_behind_where_there_are_no_kernels(two_threads, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(native, "library", lambda: None)
        with pytest.raises(InputError, match="were not built"), native.alone():
            raise AssertionError("entered")
    torch.set_num_threads(1)
    assert native.threads() == 1
