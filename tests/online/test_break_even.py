"""When dense attention is faster: measured on this machine, once, and kept."""

import json

import pytest
import torch

from shadowattn.kernels import native
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online import break_even as module
from shadowattn.online.break_even import break_even, crossing, measure
from shadowattn.online.estimators.base import FirstLook
from shadowattn.online.selection import Rule

BUILT = native.library() is not None


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([3.0, 1.5, 0.5], 0.3), ([3.0, 1.5, 1.2], 1.0), ([0.9, 0.8, 0.7], 0.1), ([3.0, 0.9, 1.1], 1.0), ([2.0, 1.0, 0.5], 0.2)],
)
def test_it_lies_between_its_neighbours(ratios, expected):
    assert crossing([0.1, 0.2, 0.4], ratios) == pytest.approx(expected)


def test_the_torch_twins_never_go_dense():
    assert break_even(TorchKernels(), torch.float32, Rule()) == 1.0


@pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")
def test_it_is_measured_once_and_kept_by_machine_kernels_and_kind(tmp_path, monkeypatch):
    from shadowattn.kernels.native_kernels import NativeKernels

    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))
    calls = []

    def counted(kernels, dtype, rule, look):
        calls.append((dtype, rule, look))
        return 0.25

    monkeypatch.setattr(module, "measure", counted)
    module._kept.cache_clear()
    kernels, look = NativeKernels(), FirstLook(1.25, 64)
    for _ in range(2):
        assert break_even(kernels, torch.float32, Rule()) == 0.25
    break_even(kernels, torch.float32, Rule(1, "max", sinks=4))  # lists of single rows, whatever the score of blocks is
    for score in ("max", "probability"):
        break_even(kernels, torch.bfloat16, Rule(16, score))
    break_even(kernels, torch.bfloat16, Rule(64, "max"))  # as lists of 16 rows
    break_even(kernels, torch.float32, Rule(), look)
    assert calls == [
        (torch.float32, Rule(), None),
        (torch.bfloat16, Rule(32, "max"), None),
        (torch.bfloat16, Rule(32, "probability"), None),
        (torch.float32, Rule(), look),
    ]
    module._kept.cache_clear()  # another process
    break_even(kernels, torch.float32, Rule())
    assert len(calls) == 4
    (kept,) = json.loads((tmp_path / "break_even.json").read_text()).values()
    assert list(kept) == [
        "single rows, float32",
        "32 rows by max, bfloat16",
        "32 rows by probability, bfloat16",
        "single rows after a look at 1.25 times as many keys, 64 rows, float32",
    ]
    (tmp_path / "break_even.json").write_text("{")
    module._kept.cache_clear()
    break_even(kernels, torch.float32, Rule())
    assert len(calls) == 5
    module._kept.cache_clear()


@pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")
@pytest.mark.parametrize(
    ("dtype", "rule", "look"),
    [
        (torch.float32, Rule(), None),
        (torch.bfloat16, Rule(32, "probability"), None),
        (torch.bfloat16, Rule(), FirstLook(1.5, 32)),
    ],
)
def test_what_is_measured_is_a_retention(dtype, rule, look, monkeypatch):
    from shadowattn.kernels.native_kernels import NativeKernels

    monkeypatch.setattr(module, "_KEYS", 512)
    monkeypatch.setattr(module, "_ROUNDS", 1)
    assert 0 < measure(NativeKernels(), dtype, rule, look) <= 1
