"""The native estimate without graphs: the same keys as with them, K packed once, and never another prompt's K."""

import pytest
import torch

import shadowattn
from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import GraphShape
from shadowattn.kernels import native
from shadowattn.online.estimators.int8 import Int8
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.path import attend_chunk, select_keys
from shadowattn.online.prefill import SparsePrefill
from shadowattn.online.selection import BLOCK_SCORES, Rule
from shadowattn.types import Heads, ScaleGrid
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
    heads, positions, rule = Heads.all(count, groups), 130 + torch.arange(70), Rule(query_block, block_score)
    kernels = shadowattn.kernels.choose("native", head_dim=64, dtype=torch.float32)
    graph, fused = Int8Tensor.of(q, k), Int8Fused.of(q, k)
    how = {"positions": positions, "heads": heads, "rule": rule, "lists": rule.lists(RETENTION, positions)}
    expected = select_keys(q, k, layer=0, estimator=graph, kernels=kernels, scale=0.125, **how)
    chosen = fused.choose(q, fused.prepare(k, layer=0), scale=0.125, **how)
    assert chosen.starts.equal(expected.starts)
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
    heads, positions, rule = Heads.all(4, 2), 130 + torch.arange(70), Rule()
    kernels = shadowattn.kernels.choose("native", head_dim=64, dtype=torch.float32)
    fused = Int8Fused(grid)
    how = {"positions": positions, "heads": heads, "rule": rule, "lists": rule.lists(RETENTION, positions)}
    expected = select_keys(q, k, layer=0, estimator=Int8(bank), kernels=kernels, scale=0.125, **how)
    chosen = fused.choose(q, fused.prepare(k, layer=0), scale=0.125, **how)
    assert chosen.indices.equal(expected.indices)


def chunked(estimator, q, k, v, chunk):
    """Chunk by chunk with a growing K, as a model's cache grows."""
    kernels = shadowattn.kernels.choose("native", head_dim=64, dtype=torch.float32)
    parts = []
    for start in range(0, q.shape[1], chunk):
        at = slice(start, start + chunk)
        keys, values = (x[:, : start + chunk].clone() for x in (k, v))
        out, _ = attend_chunk(
            q[:, at], keys, values, RETENTION, layer=0, positions=torch.arange(q.shape[1])[at], heads=Heads.all(4, 2),
            estimator=estimator, rule=Rule(), kernels=kernels, scale=0.125, keep_lists=False,
        )  # fmt: skip
        parts.append(out)
    return torch.cat(parts, 1)


def test_keys_are_packed_once_as_they_are_appended():
    q, k, v = qkv(4, 2, 1500, 1500, 64)  # beyond the first capacities
    fused = Int8Fused.of(q, k)
    out = chunked(fused, q, k, v, 100)
    assert fused.repacked == 1
    assert fused.prepare(k, layer=0).length == 1500
    expected = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=0, estimator=Int8Tensor.of(q, k), scale=0.125)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_another_prompt_that_ends_in_the_same_key_is_not_taken_for_a_continuation():
    """In the first layer a key depends on its token and its position alone."""
    _, k, _ = qkv(4, 2, 64, 64, 64)
    other = k.clone()
    other[:, 10] = -other[:, 10].flip(-1)  # the same sums and scales
    fused = Int8Fused(q_scales=torch.full((4,), 0.03), k_scales=torch.full((2,), 0.03))
    fused.prepare(k, layer=0)
    mixed = fused.prepare(other, layer=0).packed.clone()
    alone = Int8Fused(q_scales=torch.full((4,), 0.03), k_scales=torch.full((2,), 0.03)).prepare(other, layer=0).packed
    assert mixed.equal(alone)
    assert fused.repacked == 2


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
    prefill = SparsePrefill([[0.2] * 4], Int8Fused(ScaleGrid((0.02,), (0.02,))), kernel="native")
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
