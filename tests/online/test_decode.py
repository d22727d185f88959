"""Decode on a list that a key/value group shares, and heads that go dense."""

import pytest
import torch

import shadowattn
from shadowattn import reference
from shadowattn.errors import InputError
from shadowattn.kernels import choose
from shadowattn.online import attention
from shadowattn.online.attention import Request, SparseAttention
from shadowattn.online.chunk import Chunk
from shadowattn.online.decode import shared_decode
from shadowattn.online.estimators.base import FirstLook
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts
from tests.profiles import profile_for
from tests.tensors import HEADS, qkv
from tests.tiny import tiny_model

KERNELS = ["torch", "auto"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("count", "groups"), [*HEADS, (14, 2)])
def test_a_group_attends_to_its_best_keys(count, groups, kernel):
    q, k, v = qkv(count, groups, 1, 200, 64)
    retention = torch.linspace(0.05, 0.2, count, dtype=torch.float64)
    kernels = choose(kernel, head_dim=64, dtype=torch.float32)
    out = shared_decode(Chunk.of(q, k, v, retention=retention, scale=0.125), Parts(Oracle(), Rule(), kernels))
    group = count // groups
    for g in range(groups):
        heads = slice(g * group, (g + 1) * group)
        scores = q[heads, 0].double() @ k[g].double().T
        shared = (scores / scores.std(1, keepdim=True, correction=0)).sum(0)
        kept = shared.topk(int(torch.ceil(retention[heads].max() * 200))).indices
        expected = torch.softmax(scores[:, kept] * 0.125, -1) @ v[g, kept].double()
        torch.testing.assert_close(out[heads, 0].double(), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_model_decodes_on_shared_lists(kernel):
    model = tiny_model()
    ids = torch.arange(60)[None] % 50
    dense = model.generate(ids, max_new_tokens=4, do_sample=False)
    how = {"estimator": Oracle(), "chunk_tokens": 16, "kernel": kernel, "decode": "shared"}
    with shadowattn.attach(model, profile_for(model, 1.0), None, **how) as sparse:
        assert model.generate(ids, max_new_tokens=4, do_sample=False).equal(dense)  # every key: the same tokens
    assert sparse.counters.decode_rows == 3 * 2 * 4  # steps, layers, heads
    with shadowattn.attach(model, profile_for(model, 0.05), None, **how):
        logits = model(ids).logits
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_that_keep_much_go_dense(kernel):
    q, k, v = qkv(4, 2, 32, 32, 64)
    retention = [[0.1, 0.5, 0.6, 1.0]]
    prefill = SparseAttention(retention, Oracle(), chunk_tokens=16, kernel=kernel, dense_above=0.5)
    out = prefill(0, q[None], k[None], v[None], 0.125)[0]
    assert prefill.counters.sparse_rows == 32
    assert prefill.counters.dense_rows == 3 * 32
    full = reference.dense_attention(q, k, v, causal_offset=0, scale=0.125)
    torch.testing.assert_close(out[1:], full[1:], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(out[0], full[0], atol=1e-3)


@pytest.mark.parametrize(
    ("query_block", "estimator", "dense"),
    [(1, Oracle(), 3), (16, Oracle(), 1), (1, Hierarchical(candidates=1.5, block_rows=8), 2), (1, Hierarchical(block_rows=8), 3)],
)
def test_auto_goes_dense_above_the_measured_break_even(query_block, estimator, dense, monkeypatch):
    def measured(kernels, dtype, rule, look):
        return 0.8 if rule.query_block > 1 else 0.55 if look == FirstLook(1.5, 8) else 0.3

    monkeypatch.setattr(attention, "break_even", measured)
    q, k, v = qkv(4, 2, 32, 32, 64)
    how = {"chunk_tokens": 16, "query_block": query_block, "dense_above": "auto"}
    prefill = SparseAttention([[0.1, 0.5, 0.6, 0.9]], estimator, **how)
    prefill(0, q[None], k[None], v[None], 0.125)
    assert prefill.counters.dense_rows == dense * 32


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dense_above": 0.0}, "dense_above"), ({"dense_above": "often"}, "auto or"), ({"decode": "sparse"}, "dense, shared")],
)
def test_refuses_options_that_mean_nothing(change, message):
    with pytest.raises(InputError, match=message):
        SparseAttention([[0.2]], Oracle(), **change)


@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_that_prefer_no_key_have_no_say(kernel):
    q, k, v = qkv(4, 2, 1, 50, 64)
    q[0] = 0
    parts = Parts(Oracle(), Rule(), choose(kernel, head_dim=64, dtype=torch.float32))
    out = shared_decode(Chunk.of(q, k, v, retention=0.2, scale=0.125), parts)
    best = (q[1, 0] @ k[0].T).topk(10).indices
    torch.testing.assert_close(out[0, 0], v[0, best].mean(0), atol=1e-5, rtol=1e-5)


def test_a_shared_list_keeps_the_row_itself_its_window_and_the_sinks():
    """Scores that put all of them last: 20 of 100 keys are these 12 and the best of the others."""
    q, k, v = qkv(2, 1, 1, 100, 64)
    forced = [*range(4), *range(92, 100)]
    k[0, forced] = -5 * q[:, 0].mean(0)
    v = torch.zeros_like(v)
    v[0, forced] = 1.0
    sparse = SparseAttention([[0.2] * 2], Oracle(), decode="shared", sinks=4, recent=8)
    out = sparse(0, q[None], k[None], v[None], 1e-6, Request(decode=True))
    torch.testing.assert_close(out, torch.full_like(out, 12 / 20), atol=1e-3, rtol=1e-3)


def test_one_row_is_a_prompts_unless_the_request_says_otherwise():
    q, k, v = qkv(2, 1, 1, 100, 64)
    for decode, rows in ((False, (2, 0)), (True, (0, 2))):
        sparse = SparseAttention([[0.2] * 2], Oracle())
        out = sparse(0, q[None], k[None], v[None], 0.125, Request(decode=decode))
        assert (sparse.counters.sparse_rows, sparse.counters.decode_rows) == rows
        dense = reference.dense_attention(q, k, v, causal_offset=99, scale=0.125)
        assert torch.allclose(out[0], dense, atol=1e-4) is decode


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("decode", ["dense", "shared"])
def test_several_rows_of_decoding_are_as_many_steps(decode, kernel):
    """As where drafted tokens are verified: each row attends as it would alone, with the keys up to its own."""
    q, k, v = (x[None] for x in qkv(4, 2, 3, 100, 64))
    sparse = SparseAttention([[0.2] * 4], Oracle(), decode=decode, kernel=kernel)
    out = sparse(0, q, k, v, 0.125, Request(decode=True))
    assert (sparse.counters.sparse_rows, sparse.counters.decode_rows) == (0, 3 * 4)
    for row in range(3):
        end = 98 + row
        alone = sparse(0, q[:, :, row : row + 1], k[:, :, :end], v[:, :, :end], 0.125, Request(decode=True))
        torch.testing.assert_close(out[:, :, row : row + 1], alone, atol=1e-5, rtol=1e-5)


def test_refuses_a_request_that_is_none():
    q, k, v = (x[None] for x in qkv(2, 1, 2, 100, 64))
    with pytest.raises(InputError, match="request: expected a Request"):
        SparseAttention([[0.2] * 2], Oracle())(0, q, k, v, 0.125, "decode")


def test_an_estimators_own_shared_scores_count():
    class Last(Int8Fused):
        """Ranks the last keys first, whatever its products say."""

        def shared_scores(self, chunk):
            return torch.arange(float(chunk.keys)).expand(len(chunk.k), 1, -1)

    q, k, v = qkv(4, 2, 1, 50, 64)
    parts = Parts(Last.of(q, k), Rule(), choose("auto", head_dim=64, dtype=torch.float32))
    out = shared_decode(Chunk.of(q, k, v, retention=0.2, scale=0.125), parts)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k[:, -10:], v[:, -10:], scale=0.125, enable_gqa=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
