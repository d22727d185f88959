"""The clocks in the fused paths: what runs is timed, and nothing while nobody asks."""

import re
import time
from pathlib import Path

import pytest
import torch

from shadowattn.errors import InputError
from shadowattn.kernels import native
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.selection import Rule
from shadowattn.types import FirstLookLosses, Heads
from tests.tensors import qkv

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")

OF_ROWS = {"estimate", "select", "attend together", "attend alone"}


def attended(estimator, rule):
    chunk = Chunk.of(*qkv(4, 2, 200, 900, 64), retention=0.1)
    return estimator.attend(chunk, rule, lambda: rule.lists(chunk.retention, chunk.positions), listed=True)


def looked(flat_share):
    losses = FirstLookLosses([[0.0, 0.0, 1.0, 0.0]], 1.5, 16)
    return Hierarchical(candidates=1.5, block_rows=16, flat_share=flat_share, first_look=losses)


def parts_of(stages):
    return set(native.PARTS) if "attend together" in stages else set()


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize(
    ("estimator", "rule", "stages"),
    [
        (Int8Fused(), Rule(), OF_ROWS),
        (Int8Fused(), Rule(32, "probability"), {"estimate", "select", "attend together"}),
        (looked(0.0), Rule(), {"first look", "let through", "estimate", "select", "attend together"}),
        (looked(0.25), Rule(), {"first look", "let through", "estimate", "select", "attend together", "spared heads"}),
        (looked(1.0), Rule(), {"spared heads"}),
    ],
)
def test_what_runs_is_timed_and_computes_the_same(level, estimator, rule, stages):
    with native.forced_level(level):
        out, selection = attended(estimator, rule)
        with native.timed_stages() as seconds:
            again, listed = attended(estimator, rule)
    assert tuple(seconds) == native.STAGES + native.PARTS
    spent = {stage for stage, spent in seconds.items() if spent}
    assert spent & set(native.STAGES) == stages
    in_common = stages != OF_ROWS or "form" in spent  # at some levels these rows have no keys in common
    assert spent & set(native.PARTS) == (parts_of(stages) if in_common else set())
    assert all(spent >= 0 for spent in seconds.values())
    assert sum(seconds[part] for part in native.PARTS) <= seconds["attend together"]
    assert again.equal(out)
    assert listed.indices.equal(selection.indices)


def test_stages_are_called_as_the_interface_numbers_them():
    header = (Path(native.__file__).parent / "csrc" / "abi.h").read_text()
    enum = re.search(r"typedef enum \{([^}]*)\} SaStage;", header)[1]
    words = {
        "SA_LOOK": "first look",
        "SA_LET_THROUGH": "let through",
        "SA_ESTIMATE": "estimate",
        "SA_CHOOSE": "select",
        "SA_TOGETHER": "attend together",
        "SA_ALONE": "attend alone",
        "SA_SPARED": "spared heads",
        "SA_FORM": "form",
        "SA_SCORES": "scores",
        "SA_SOFTMAX": "softmax",
        "SA_VALUES": "values",
    }
    *stages, last = (name.strip() for name in enum.split(","))
    assert last == "SA_STAGES"
    assert tuple(words[name] for name in stages) == native.STAGES + native.PARTS


@pytest.mark.parametrize("rule", [Rule(), Rule(32, "probability")])
def test_the_stages_take_no_longer_than_the_threads_have(rule):
    start = time.perf_counter()
    with native.timed_stages() as seconds:
        attended(Int8Fused(), rule)
    assert sum(seconds[stage] for stage in native.STAGES) <= (time.perf_counter() - start) * torch.get_num_threads()


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 70])
def test_dense_attention_is_timed_too(level, dtype, rows):
    """Of a few rows, which go through keys in another way, no part is timed."""
    q, k, v = (x.to(dtype) for x in qkv(4, 2, rows, 500, 64))
    attend = lambda: NativeKernels().dense(q, k, v, Heads.all(4, 2), causal_offset=500 - rows, scale=0.1)  # noqa: E731
    with native.forced_level(level):
        out = attend()
        with native.timed_stages() as seconds:
            assert attend().equal(out)
    stages = {"attend together"}
    assert {stage for stage, spent in seconds.items() if spent} == stages | (parts_of(stages) if rows > 8 else set())
    assert sum(seconds[part] for part in native.PARTS) <= seconds["attend together"]


def test_nothing_is_timed_before_and_after():
    attended(Int8Fused(), Rule())
    with native.timed_stages() as seconds:
        pass
    assert not any(seconds.values())


def test_clocks_stop_where_a_call_fails():
    with pytest.raises(RuntimeError), native.timed_stages():
        raise RuntimeError
    attended(Int8Fused(), Rule())
    with native.timed_stages() as seconds:
        pass
    assert not any(seconds.values())


def test_clocks_inside_clocks_are_refused():
    with native.timed_stages(), pytest.raises(InputError, match="stages are timed already"), native.timed_stages():
        pass
    with native.timed_stages() as seconds:
        attended(Int8Fused(), Rule())
    assert seconds["estimate"] > 0
