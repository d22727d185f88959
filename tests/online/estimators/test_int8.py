"""What `int8` stands for, and that it makes no difference to a list: the native kernels against OpenVINO's graphs."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shadowattn
from shadowattn.graphs import GraphForm
from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.symmetric_int8 import absmax_scales
from shadowattn.kernels import native
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import int8_fused
from shadowattn.online.estimators.int8 import Int8
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.functional import estimator_of, named_estimator
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.selection import Rule
from shadowattn.types import ScaleGrid
from tests.profiles import profile_for
from tests.tensors import qkv
from tests.tiny import tiny_model

needs_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")
CPU = torch.device("cpu")
GRID = ScaleGrid((0.011, 0.052), (0.013, 0.047))
SHAPES = st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)])
RULES = st.fixed_dictionaries(
    {
        "query_block": st.sampled_from([1, 4, 16]),
        "block_score": st.sampled_from(["leading_query", "max", "sum"]),
        "sinks": st.integers(0, 3),
        "recent": st.integers(0, 3),
        "min_budget": st.sampled_from([1, 1, 16]),
    }
)


def tensors(kind: str, heads: int, groups: int, rows: int, keys: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k: of normal values; of few, so that products tie; of one large value, so that most others round to zero."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, size, dim, generator=generator) for n, size in ((heads, rows), (groups, keys)))
    if kind == "ties":
        q, k = q.sign(), k.sign()
    if kind == "spike":
        q[:, 0, 0], k[:, -1, -1] = 300.0, -300.0
    return q, k


def both_lists(estimators, chunk: Chunk, rule: Rule):
    lists = rule.lists(chunk.retention, chunk.positions)
    return [estimator.select(chunk, rule, lists, TorchKernels()) for estimator in estimators]


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(
    shape=SHAPES, rows=st.integers(1, 40), past=st.integers(0, 90), dim=st.sampled_from([8, 40, 64]), rule=RULES,
    kind=st.sampled_from(["normal", "ties", "spike"]), retention=st.sampled_from([0.01, 0.2, 0.7]), seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_integers_and_lists_are_those_of_the_graph(shape, rows, past, dim, rule, kind, retention, seed, dtype):
    q, k = (x.to(dtype) for x in tensors(kind, *shape, rows, rows + past, dim, seed))
    chunk = Chunk.of(q, k, retention=retention, positions=torch.arange(past, past + rows))
    served, graph = estimator_of("int8", q, k), estimator_of("int8_graph", q, k)
    assert (type(served), type(graph)) == (Int8Fused, Int8Tensor)
    assert served.scores(chunk).equal(graph.scores(chunk))
    chosen, expected = both_lists((served, graph), chunk, Rule(**rule))
    assert chosen.indices.equal(expected.indices)
    assert chosen.indptr.equal(expected.indptr)


@needs_kernels
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 16), past=st.integers(0, 40), rule=RULES, seed=st.integers(0, 999), loud=st.floats(0.1, 30),
    kind=st.sampled_from(["normal", "ties"]), offset=st.floats(-0.5, 0.5),
)  # fmt: skip
def test_lists_are_those_of_a_bank(bank, rows, past, rule, seed, loud, kind, offset):
    """With the static scales of a grid, whichever pair of them serves a head."""
    q, k = tensors(kind, 4, 2, rows, rows + past, 64, seed)
    q[1:] *= loud
    k += offset
    chunk = Chunk.of(q, k, retention=0.2, positions=torch.arange(past, past + rows))
    served, graph = Int8Fused(GRID), Int8Graph(bank)
    chosen, expected = both_lists((served, graph), chunk, Rule(**rule))
    assert served.clipped == graph.clipped
    assert chosen.indices.equal(expected.indices)
    assert chosen.indptr.equal(expected.indptr)


@pytest.fixture(scope="module")
def bank() -> GraphBank:
    profile = profile_for(tiny_model(), 0.2, grid=GRID)
    return GraphBank.build(profile, (GraphShape(1, 16, 64, 64),), device="CPU", form=GraphForm("unit"))


@needs_kernels
def test_the_name_stands_for_what_serves_the_tensors():
    assert Int8.of_tensors(head_dim=64, dtype=torch.bfloat16, device=CPU) is Int8Fused
    for head_dim, dtype in ((20, torch.float32), (264, torch.float32), (64, torch.float16)):
        assert Int8.of_tensors(head_dim=head_dim, dtype=dtype, device=CPU) is Int8Tensor
    assert type(named_estimator("int8_graph", head_dim=64, dtype=torch.float32, device=CPU)) is Int8Tensor


def test_without_native_kernels_the_graph_serves(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    assert Int8.of_tensors(head_dim=64, dtype=torch.float32, device=CPU) is Int8Tensor


@needs_kernels
@pytest.mark.parametrize("name", [None, "int8"])
def test_a_model_takes_the_native_kernels_but_for_modes_that_launch(name):
    model = tiny_model()
    assert type(shadowattn.Method(0.2, estimator=name).attention(model).estimator) is Int8Fused
    assert type(shadowattn.Method(0.2, estimator=name, pipeline=Pipeline("grouped")).attention(model).estimator) is Int8Tensor
    assert type(shadowattn.Method(0.2, estimator="int8_graph").attention(model).estimator) is Int8Tensor


def test_scores_by_graphs_stay_where_nobody_holds_their_memory_and_are_overwritten_where_somebody_does():
    q, k, _ = qkv(4, 2, 8, 40, 64)
    first, other = Chunk.of(q, k), Chunk.of(-q, k)
    estimator = Int8Tensor()
    for one in (estimator, copy.deepcopy(estimator), pickle.loads(pickle.dumps(estimator))):
        kept = one.scores(first)
        expected = kept.clone()
        assert one.scores(other).equal(-expected)
        assert kept.equal(expected)
        with one.use():
            held = one.scores(first)
            assert held.equal(expected)
            one.scores(other)
            assert held.equal(-expected)
        assert one.scores(first).equal(expected)
        assert held.equal(-expected)


def test_queries_are_measured_once_a_chunk_and_scales_carry_no_gradient():
    q, k, v = qkv(4, 2, 6, 40, 16)
    chunk = Chunk.of(q.requires_grad_(), k, v, retention=0.5)
    grid = ScaleGrid((0.01, 0.02), (0.01, 0.02))
    with mock.patch.object(int8_fused.ops, "largest", wraps=int8_fused.ops.largest) as largest:
        units = Int8Fused(grid).units(chunk)
        Int8Fused(grid).select(chunk, Rule(), Rule().lists(chunk.retention, chunk.positions), NativeKernels())
    assert largest.call_count == 1
    assert not units.requires_grad
    assert not int8_fused.measured_scales(q).requires_grad
    assert int8_fused.measured_scales(q).equal(absmax_scales(q.detach()))
