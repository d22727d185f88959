"""The native estimate without graphs: the same keys as with them, K packed once, and never another prompt's K."""

import pytest
import torch

import shadowattn
from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.symmetric_int8 import absmax_scales
from shadowattn.kernels import native, ops
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.attention import Request, SparseAttention
from shadowattn.online.cache import LayerCache
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.executor import Threads, run_batched
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.selection import BLOCK_SCORES, Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.types import ScaleGrid
from tests.profiles import profile_for
from tests.tensors import HEADS, qkv
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")
RETENTION = torch.full((4,), 0.2, dtype=torch.float64)


@pytest.mark.parametrize("block_score", BLOCK_SCORES)
@pytest.mark.parametrize("query_block", [1, 8, 32])
@pytest.mark.parametrize(("count", "groups"), HEADS)
def test_selects_bit_for_bit_what_the_graph_selects(count, groups, query_block, block_score):
    q, k, _ = qkv(count, groups, 70, 200, 64)
    chunk, rule = Chunk.of(q, k, retention=RETENTION, scale=0.125), Rule(query_block, block_score)
    kernels = shadowattn.kernels.choose("native", head_dim=64, dtype=torch.float32)
    graph, fused = Int8Tensor.of(q, k), Int8Fused.of(q, k)
    expected, chosen = (one.select(chunk, rule, rule.lists(RETENTION, chunk.positions), kernels) for one in (graph, fused))
    assert chosen.indptr.equal(expected.indptr)
    if rule.pooling == "probability":  # float32 sums of exponentials in another order: near ties may fall either way
        assert (chosen.indices != expected.indices).float().mean() < 0.01
    else:
        assert chosen.indices.equal(expected.indices)


def test_selects_what_the_bank_selects():
    """Static scales of a grid, two of the pairs in use."""
    model = tiny_model()
    grid = ScaleGrid((0.01, 0.05), (0.01, 0.05))
    bank = GraphBank.build(profile_for(model, 0.2, grid=grid), (GraphShape(1, 70, 64, 200),), device="CPU")
    q, k, _ = qkv(4, 2, 70, 200, 64)
    q[1:] *= 0.2
    chunk, rule = Chunk.of(q, k, retention=RETENTION, scale=0.125), Rule()
    kernels = shadowattn.kernels.choose("native", head_dim=64, dtype=torch.float32)
    fused = Int8Fused(grid)
    lists = rule.lists(RETENTION, chunk.positions)
    expected, chosen = (one.select(chunk, rule, lists, kernels) for one in (Int8Graph(bank), fused))
    assert chosen.indices.equal(expected.indices)


def chunked(estimator, q, k, v, chunk, cache):
    """Chunk by chunk with a growing K, as a model's cache grows."""
    parts = Parts(estimator, Rule(), shadowattn.kernels.choose("native", head_dim=64, dtype=torch.float32))
    made = []
    for start in range(0, q.shape[1], chunk):
        keys, values = (x[:, : start + chunk].clone() for x in (k, v))
        of = Chunk.of(q[:, start : start + chunk], keys, values, retention=RETENTION, scale=0.125, cache=cache)
        made.append(Pipeline().run(Stages(of, parts), keep_lists=False).out)
    return torch.cat(made, 1)


def test_keys_are_packed_once_as_they_are_appended():
    q, k, v = qkv(4, 2, 1500, 1500, 64)  # beyond the first capacities
    fused, cache = Int8Fused.of(q, k), LayerCache()
    out = chunked(fused, q, k, v, 100, cache)
    assert fused.repacked == 1
    assert fused.packed(Chunk.of(q[:, -1:], k, cache=cache)).length == 1500
    assert fused.repacked == 1
    expected = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=0, estimator=Int8Tensor.of(q, k), scale=0.125)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_decoding_steps_pack_the_keys_that_are_new(monkeypatch):
    q, k, v = qkv(4, 2, 6, 106, 64)
    packed, pack = [], ops.pack
    monkeypatch.setattr(ops, "pack", lambda k, *rest: (packed.append(k.shape[1]), pack(k, *rest))[1])
    fused, cache = Int8Fused.of(q, k), LayerCache()
    sparse = SparseAttention([RETENTION], fused, decode="shared")
    for row in range(6):
        keys = 101 + row
        step = q[None, :, row : row + 1], k[None, :, :keys].clone(), v[None, :, :keys].clone()
        out = sparse(0, *step, 0.125, Request(decode=True, caches=(cache,)))
        alone = SparseAttention([RETENTION], Int8Fused.of(q, k), decode="shared")(0, *step, 0.125, Request(decode=True))
        assert out.equal(alone)
    assert packed == [101, 101, 1, 102, 1, 103, 1, 104, 1, 105, 1, 106]  # with and without a cache by turns
    assert fused.repacked == 1


def test_measured_scales_grow_with_the_keys():
    """Packed by the largest key so far, from anew when that grows: as a bank of graphs without steps between its scales."""
    q, k, v = qkv(4, 2, 400, 400, 64)
    k[:, 250] *= 3
    fused = Int8Fused()
    out = chunked(fused, q, k, v, 50, LayerCache())
    torch.testing.assert_close(out, chunked(Int8Tensor(), q, k, v, 50, LayerCache()), atol=1e-5, rtol=1e-5)
    assert 2 <= fused.repacked < 8


@pytest.mark.parametrize("kernels", [NativeKernels(), TorchKernels()], ids=lambda kernels: kernels.name)
def test_scales_of_keys_alone_leave_those_of_queries_to_each_chunk(kernels):
    q, k, v = qkv(4, 2, 80, 300, 64)
    fused = Int8Fused(k_scales=absmax_scales(k))
    for rows in (q[:, :70], 5 * q[:, :70]):
        chunk = Chunk.of(rows, k, v, retention=0.2)
        lists = Rule().lists(chunk.retention, chunk.positions)
        expected = Int8Fused.of(rows, k).select(chunk, Rule(), lists, kernels).indices
        assert fused.select(chunk, Rule(), lists, kernels).indices.equal(expected)
        assert fused.attend(chunk, Rule(), lambda lists=lists: lists, listed=True)[1].indices.equal(expected)
    assert fused.goes_by == "chunk"


@pytest.mark.parametrize("length", [0, 1, 64, 70, 99])
def test_cropped_keys_are_packed_again(length):
    _, k, _ = qkv(4, 2, 1, 100, 64)
    other = k.clone()
    other[:, length:] = -k[:, length:].flip(1)
    fused, cache = Int8Fused(q_scales=torch.full((4,), 0.03), k_scales=torch.full((2,), 0.03)), LayerCache()
    for keys in (k[:, :70], k):
        fused.prepare(Chunk.of(keys[:2, -1:], keys, cache=cache))
    cache.crop(length)
    fused.prepare(Chunk.of(other[:2, -1:], other, cache=cache))
    alone = LayerCache()
    fused.prepare(Chunk.of(other[:2, -1:], other, cache=alone))
    mixed, alone = (fused.packed(Chunk.of(other[:2, -1:], other, cache=of)).packed[:, :6] for of in (cache, alone))
    assert mixed.equal(alone)


def test_a_batch_is_several_prompts():
    model = tiny_model()
    ids = torch.stack([torch.arange(40) % 60, (torch.arange(40) * 7 + 3) % 60])
    ids[1, -1] = ids[0, -1]
    profile = profile_for(model, 0.3)
    with torch.no_grad(), shadowattn.attach(model, profile, None, estimator=Int8Fused(profile.scales), chunk_tokens=16):
        together = model(ids).logits
        apart = torch.cat([model(one[None]).logits for one in ids])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value):
    q, k, v = qkv(4, 2, 20, 20, 64)
    k[0, 3, 3] = value
    prefill = SparseAttention([[0.2] * 4], Int8Fused(ScaleGrid((0.02,), (0.02,))), kernel="native")
    with pytest.raises(shadowattn.errors.InputError, match="NaN or infinity"):
        prefill(0, q[None], k[None], v[None], 0.125)


@pytest.mark.parametrize(("dim", "dtype"), [(20, torch.float32), (264, torch.float32), (64, torch.float16)])
def test_what_the_native_estimate_cannot_hold_is_refused(dim, dtype):
    q, k, v = (x.to(dtype) for x in qkv(2, 1, 4, 8, dim))
    with pytest.raises(shadowattn.errors.InputError, match="multiple of 8 up to 256"):
        shadowattn.sparse_attention(q, k, v, 0.5, causal_offset=4, estimator="int8_fused", kernel="torch")


def test_sums_that_do_not_fit_are_refused():
    q, k, v = qkv(1, 1, 600, 600, 256)
    with pytest.raises(shadowattn.errors.InputError, match="32 bits"):
        shadowattn.sparse_attention(q, k, v, 0.5, causal_offset=0, estimator="int8_fused", query_block=600, block_score="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_task_gives_what_the_stages_give(dtype):
    """Lists bit for bit, whether somebody wants them or not; a budget of threads of its own takes the stages apart."""
    q, k, v = (x.to(dtype) for x in qkv(4, 2, 70, 300, 64))
    chunk, parts = Chunk.of(q, k, v, retention=0.2), Parts(Int8Fused.of(q, k), Rule(sinks=2, recent=3), NativeKernels())
    apart = run_batched(Stages(chunk, parts), threads=Threads(estimate=1), keep_lists=True)
    listed = run_batched(Stages(chunk, parts), threads=Threads(), keep_lists=True)
    counted = run_batched(Stages(chunk, parts), threads=Threads(), keep_lists=False)
    assert [span.stage for span in counted.timeline.spans] == ["attend"]
    assert {span.stage for span in apart.timeline.spans} == {"estimate", "attend"}
    assert listed.selected.indices.equal(apart.selected.indices)
    assert listed.selected.indptr.equal(apart.selected.indptr)
    assert counted.selected == apart.selected.kept()
    assert counted.out.equal(listed.out)
    torch.testing.assert_close(counted.out, apart.out, atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
