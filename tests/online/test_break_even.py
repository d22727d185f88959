"""When dense attention is faster: measured on this machine, once, and kept."""

import json

import pytest
import torch

from shadowattn.kernels import native
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online import break_even as module
from shadowattn.online.break_even import break_even, crossing, measure

BUILT = native.library() is not None


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([3.0, 1.5, 0.5], 0.3), ([3.0, 1.5, 1.2], 1.0), ([0.9, 0.8, 0.7], 0.1), ([3.0, 0.9, 1.1], 1.0), ([2.0, 1.0, 0.5], 0.2)],
)
def test_it_lies_between_its_neighbours(ratios, expected):
    assert crossing([0.1, 0.2, 0.4], ratios) == pytest.approx(expected)


def test_the_torch_twins_never_go_dense():
    assert break_even(TorchKernels(), torch.float32, 1) == 1.0


@pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")
def test_it_is_measured_once_and_kept_by_machine_kernels_and_kind(tmp_path, monkeypatch):
    from shadowattn.kernels.native_kernels import NativeKernels

    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))
    calls = []

    def counted(kernels, dtype, query_block):
        calls.append((dtype, query_block))
        return 0.25

    monkeypatch.setattr(module, "measure", counted)
    module._kept.cache_clear()
    for _ in range(2):
        assert break_even(NativeKernels(), torch.float32, 1) == 0.25
    break_even(NativeKernels(), torch.bfloat16, 16)
    break_even(NativeKernels(), torch.bfloat16, 64)  # as lists of 16 rows
    assert calls == [(torch.float32, 1), (torch.bfloat16, 32)]
    module._kept.cache_clear()  # another process
    break_even(NativeKernels(), torch.float32, 1)
    assert len(calls) == 2
    (kept,) = json.loads((tmp_path / "break_even.json").read_text()).values()
    assert kept == {"own float32": 0.25, "shared bfloat16": 0.25}
    (tmp_path / "break_even.json").write_text("{")
    module._kept.cache_clear()
    break_even(NativeKernels(), torch.float32, 1)
    assert len(calls) == 3
    module._kept.cache_clear()


@pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")
@pytest.mark.parametrize(("dtype", "query_block"), [(torch.float32, 1), (torch.bfloat16, 32)])
def test_what_is_measured_is_a_retention(dtype, query_block, monkeypatch):
    from shadowattn.kernels.native_kernels import NativeKernels

    monkeypatch.setattr(module, "_KEYS", 512)
    monkeypatch.setattr(module, "_ROUNDS", 1)
    assert 0 < measure(NativeKernels(), dtype, query_block) <= 1
