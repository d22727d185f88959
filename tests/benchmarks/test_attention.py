"""The attention benchmark on small cases: that it runs, that what it times agrees, and its arithmetic. Never how fast."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks import candidates, memory
from benchmarks.attention_figures import break_even
from benchmarks.candidates import Case, Tensors
from shadowattn.interleave import Timing, interleave, ratio
from shadowattn.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")


def test_interleaves_and_drops_the_warm_up():
    order = []
    timings = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, warmup=2)
    assert order == ["a", "b"] * 5
    assert all(len(timing.seconds) == 3 for timing in timings.values())


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    assert ratio(Timing((4.0, 9.0, 2.0)), Timing((2.0, 3.0, 2.0))) == 2.0


def test_break_even_lies_between_its_neighbours():
    assert break_even(np.array([0.1, 0.2, 0.4]), np.array([3.0, 1.5, 0.5])) == pytest.approx(0.3)
    assert break_even(np.array([0.1, 0.2]), np.array([3.0, 1.5])) is None
    assert break_even(np.array([0.1, 0.2]), np.array([0.3, 0.5])) is None


@pytest.mark.parametrize("shape", candidates.SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_timed_computes_the_same(shape, dtype):
    t = Tensors(Case(shape, dtype, 200, 64, 1.0))  # retention 1: every way is dense attention
    dense = candidates.baselines(t)
    expected = dense["sdpa"]()[0].float()
    calls = {"own dense": dense["own dense"]} | candidates.attend_only(t) | candidates.gather(t, 32)
    for name, call in calls.items():
        torch.testing.assert_close(call().float(), expected, atol=2e-2, rtol=2e-2, msg=name)
    for call in (candidates.stages(t) | candidates.totals(t, 1) | candidates.totals(t, 32, "sum")).values():
        call()
    step = candidates.decode(Tensors(Case(shape, dtype, 200, 1, 1.0)))
    expected = step["sdpa"]().float().flatten()
    for name in ("torch grouped bmm", "own dense", "attend, shared list", "total (int8_fused), shared list"):
        torch.testing.assert_close(step[name]().float().flatten(), expected, atol=2e-2, rtol=2e-2, msg=name)


def test_the_command_writes_rows_figures_and_a_table(tmp_path):
    out = tmp_path / "rows.csv"
    options = ["--only", "decode", "--shape", "qwen2-0.5b", "--dtype", "float32", "--rounds", "1", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.attention", *options], capture_output=True, text=True, check=True, timeout=300
    )
    rows = pd.read_csv(out)
    assert set(rows.measured) == {"measured"}
    assert set(rows.path_kind) == {"timing"}
    assert (rows[rows.metric == "time"].value > 0).all()
    assert "own dense" in done.stdout


def test_the_command_refuses_what_it_cannot_measure():
    done = subprocess.run([sys.executable, "-m", "benchmarks.attention", "--rounds", "0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "at least one round" in done.stderr


def test_totals_say_by_which_estimator():
    t = Tensors(Case("qwen2-0.5b", torch.float32, 200, 64, 0.5))
    assert list(candidates.totals(t, 32)) == [
        "total (int8), 32-row blocks, leading_query",
        "total (int8_fused), 32-row blocks, leading_query",
    ]
    built = {name: call.__qualname__.split(".")[0] for name, call in candidates.totals(t, 1).items()}
    assert built == {"total (int8), per row": "_graph_total", "total (int8_fused), per row": "_fused_total"}


def test_every_candidate_of_the_memory_benchmark_is_known():
    t = Tensors(Case("qwen2-0.5b", torch.float32, 200, 64, 0.5))
    known = candidates.baselines(t) | candidates.totals(t, 1) | candidates.totals(t, 32)
    assert set(memory.CANDIDATES) == set(known)
