"""On processors whose INT8 sums saturate, graphs multiply in float32, and their integers stay exact."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shadowattn.graphs import GraphForm, GraphShape
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import cpu_hints, multiplies_exactly
from shadowattn.graphs.estimation import estimation_graph
from shadowattn.types import Requant
from tests.tensors import qkv

_CPUINFO = Path("/proc/cpuinfo")
HAS_VNNI = _CPUINFO.exists() and "avx512_vnni" in _CPUINFO.read_text() and "ONEDNN_MAX_CPU_ISA" not in os.environ

_LARGEST = """
import torch
from shadowattn.devices import find_estimate_device
from shadowattn.graphs.cpu import multiplies_exactly
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_tensor import Int8Tensor

q, k = torch.rand(2, 8, 64), torch.rand(1, 40, 64)  # of one sign: sums of pairs leave 16 bits
q[..., 0], k[..., 0] = 1.0, 1.0
estimator = Int8Tensor.of(q, k)
scores = estimator.scores(Chunk.of(q, k))
expected = torch.round(q * 127) @ torch.round(k * 127).mT
print(multiplies_exactly(), torch.equal(scores, expected), find_estimate_device("cpu").label)
"""


def run_with(isa):
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa}
    done = subprocess.run([sys.executable, "-c", _LARGEST], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's instruction sets are those of x86-64")
def test_without_vnni_graphs_multiply_in_float32():
    assert run_with("AVX2") == "False True CPU in float32"


@pytest.mark.skipif(not HAS_VNNI, reason="this processor has no AVX-512 VNNI, or oneDNN is held to less")
def test_with_vnni_products_are_exact_in_int8():
    """Or all tests of INT8 execution, which hold either way, would pass in float32 unnoticed."""
    assert multiplies_exactly()


def test_the_hint_follows_from_what_this_processor_does():
    assert ("LP_TRANSFORMS_MODE" in cpu_hints()) == (not multiplies_exactly())


@pytest.mark.parametrize("requant", [None, Requant("target_requant", 2e-3)])
def test_whole_factors_give_the_same_scores(requant):
    """What multiplies in float32 on such processors is the same estimate."""
    q, k, _ = qkv(4, 2, 8, 40, 64)
    given = [x[None].numpy() for x in (q.reshape(2, 16, 64), k)]
    shape, scales = GraphShape(4, 8, 64, 40, group=2), (0.02, 0.03)
    scores = [
        core().compile_model(estimation_graph(shape, GraphForm(requant=requant), *scales, whole=whole), "CPU", hints)(given)[0]
        for whole, hints in ((False, cpu_hints()), (True, {"INFERENCE_PRECISION_HINT": "f32", "LP_TRANSFORMS_MODE": False}))
    ]
    if requant is None:
        np.testing.assert_array_equal(*(np.rint(s / (scales[0] * scales[1])) for s in scores))
    else:
        assert np.abs(scores[0].astype(int) - scores[1]).max() <= 1
