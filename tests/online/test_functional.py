"""`sparse_attention`, the whole online path on plain tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowattn
from shadowattn import reference
from shadowattn.errors import InputError
from shadowattn.kernels import native
from shadowattn.online import functional
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from tests.tensors import HEAD_DIMS, HEADS, integer_qkv, qkv

ESTIMATORS = ["int8", "int8_fused", "oracle", "quantised", "streaming", "random"]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_retention_one_equals_dense(estimator, heads, kv_heads, head_dim):
    q, k, v = qkv(heads, kv_heads, 40, 70, head_dim)
    out = shadowattn.sparse_attention(q, k, v, 1.0, causal_offset=30, estimator=estimator)
    torch.testing.assert_close(out, reference.dense_attention(q, k, v, causal_offset=30), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("estimator", functional.ESTIMATORS)
def test_torchs_default_dtype_changes_no_bit(estimator, kernel):
    """Also the memory that C++ writes to is of the dtype that it is said to be."""
    q, k, v = qkv(4, 2, 40, 300, 64)
    for query_block in (1,) if estimator == "hierarchical" else (1, 16):  # which makes no lists for blocks
        how = {"causal_offset": 260, "estimator": estimator, "kernel": kernel, "query_block": query_block}
        outputs = []
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                outputs.append(shadowattn.sparse_attention(q, k, v, 0.1, **how))
            finally:
                torch.set_default_dtype(torch.float32)
        assert all(out.equal(outputs[0]) for out in outputs)


@pytest.mark.parametrize("block_score", ["leading_query", "max"])
@pytest.mark.parametrize("query_block", [1, 5, 32])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_oracle_equals_reference(heads, kv_heads, query_block, block_score):
    q, k, v = integer_qkv(heads, kv_heads, 300, 333, 16)  # more rows than one chunk
    retention = torch.linspace(0.05, 0.9, heads)
    how = {"causal_offset": 33, "query_block": query_block, "block_score": block_score}
    out = shadowattn.sparse_attention(q, k, v, retention, estimator="oracle", **how)
    torch.testing.assert_close(out, reference.topk_attention(q, k, v, retention, **how), atol=1e-5, rtol=1e-5)


def test_int8_equals_reference_where_int8_is_exact():
    # Integers whose largest is 127 steps: quantisation loses nothing, so INT8 must select what exact scores select.
    q, k, v = integer_qkv(4, 2, 50, 80, 64)
    q[:, 0, 0] = k[:, 0, 0] = 127.0
    out = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=30)
    torch.testing.assert_close(out, reference.topk_attention(q, k, v, 0.2, causal_offset=30), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("query_block", [1, 32])
@pytest.mark.parametrize("estimator", ["oracle", "streaming", "random", "int8 with fixed scales"])
def test_a_future_token_changes_nothing(estimator, query_block):
    q, k, v = qkv(4, 2, 70, 70, 64)
    if estimator.startswith("int8"):
        estimator = Int8Tensor.of(q, k)
    before = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=0, estimator=estimator, query_block=query_block)
    for changed in (40, 69):
        q2, k2, v2 = (x.clone() for x in (q, k, v))
        for x in (q2, k2, v2):
            x[:, changed:] += 1.0
        after = shadowattn.sparse_attention(q2, k2, v2, 0.2, causal_offset=0, estimator=estimator, query_block=query_block)
        torch.testing.assert_close(after[:, :changed], before[:, :changed], atol=1e-6, rtol=1e-6)
        assert not torch.allclose(after[:, changed:], before[:, changed:])


def test_a_pooled_block_may_see_its_own_rows_but_no_earlier_block_does():
    """The documented price of `max`: it pools the scores of all rows of a block."""
    q, k, v = qkv(2, 1, 64, 64, 16)
    how = {"causal_offset": 0, "estimator": "oracle", "query_block": 32, "block_score": "max"}
    before = shadowattn.sparse_attention(q, k, v, 0.5, **how)
    q[:, 63] = 10 * q[:, 63].flip(-1)
    after = shadowattn.sparse_attention(q, k, v, 0.5, **how)
    assert after[:, :32].equal(before[:, :32])
    assert not after[:, 32:63].equal(before[:, 32:63])


@pytest.mark.parametrize("estimator", ["oracle", "streaming", "random", "int8 with fixed scales"])
def test_splitting_the_rows_changes_nothing(estimator):
    q, k, v = integer_qkv(4, 2, 64, 64, 64)
    if estimator.startswith("int8"):
        estimator = Int8Tensor.of(q, k)
    whole = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=0, estimator=estimator)
    parts = [
        shadowattn.sparse_attention(q[:, at : at + 16], k, v, 0.2, causal_offset=at, estimator=estimator)
        for at in range(0, 64, 16)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-6, rtol=1e-6)


def test_threads_change_nothing_selected():
    q, k, v = qkv(4, 2, 64, 64, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=0)
        torch.set_num_threads(2)
        two = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=0)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-6)


def test_bfloat16_in_bfloat16_out():
    q, k, v = (x.bfloat16() for x in qkv(4, 2, 20, 40, 64))
    out = shadowattn.sparse_attention(q, k, v, 1.0, causal_offset=20)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), reference.dense_attention(q, k, v, causal_offset=20), atol=2e-2, rtol=2e-2)


def test_a_huge_score_does_not_overflow_the_softmax():
    q, k, v = qkv(1, 1, 4, 8, 64)
    out = shadowattn.sparse_attention(1e4 * q, 1e4 * k, v, 0.5, causal_offset=4)
    assert torch.isfinite(out).all()


def test_scale_is_used():
    q, k, v = qkv(2, 1, 5, 9, 16)
    out = shadowattn.sparse_attention(q, k, v, 0.5, causal_offset=4, estimator="oracle", scale=0.7)
    torch.testing.assert_close(out, reference.topk_attention(q, k, v, 0.5, causal_offset=4, scale=0.7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"retention": 0.0}, r"in \(0, 1\]"),
        ({"estimator": "int4"}, "estimator: expected one of .*int8"),
        ({"kernel": "cuda"}, "kernel: expected"),
        ({"causal_offset": 6}, "causal_offset"),
        ({"query_block": 0}, "query_block: expected an integer of 1"),
        ({"block_score": "mean"}, "leading_query, pooled_query, max, sum, probability"),
    ],
)
def test_refuses_options_that_do_not_fit(change, message):
    q, k, v = qkv(2, 1, 5, 10, 8)
    options = {"retention": 0.5, "causal_offset": 5} | change
    with pytest.raises(InputError, match=message):
        shadowattn.sparse_attention(q, k, v, options.pop("retention"), **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_refuses_values_that_are_not_finite(which, value):
    tensors = qkv(2, 1, 5, 10, 8)
    tensors[which][0, 0, 0] = value
    with pytest.raises(InputError, match="NaN or infinity"):
        shadowattn.sparse_attention(*tensors, 0.5, causal_offset=5)


def test_refuses_shapes_that_do_not_fit():
    q, k, v = qkv(2, 1, 5, 10, 8)
    with pytest.raises(InputError, match="multiple of G"):
        shadowattn.sparse_attention(q, k[:, :, :4], v, 0.5, causal_offset=5)


@given(
    dim=st.sampled_from([8, 24, 64, 128, 136]),
    shape=st.sampled_from([(1, 1), (2, 2), (4, 2), (7, 1), (10, 2)]),
    rows=st.sampled_from([1, 2, 31, 33, 130, 300]),
    offset=st.sampled_from([0, 1, 63, 200]),
    rule=st.fixed_dictionaries(
        {
            "query_block": st.sampled_from([1, 1, 2, 7, 16, 32, 50, 64, 100, 400]),
            "block_score": st.sampled_from(["leading_query", "max", "sum"]),
            "sinks": st.sampled_from([0, 0, 2, 50]),
            "recent": st.sampled_from([0, 0, 3, 50]),
            "min_budget": st.sampled_from([1, 1, 16, 80]),
        }
    ),
    strided=st.booleans(),
    threads=st.sampled_from([1, 2, 5]),
    level=st.sampled_from(native.levels() or ["torch"]),
    seed=st.integers(0, 999),
)
def test_every_path_computes_what_the_reference_defines(dim, shape, rows, offset, rule, strided, threads, level, seed):
    """Twins, instruction sets, strides, threads, head-specific budgets; then the fused estimate against the graphs."""
    heads, groups = shape
    q, k, v = integer_qkv(heads, groups, rows, rows + offset, dim, seed=seed)
    if strided:
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    generator = torch.Generator().manual_seed(seed)
    retention = torch.tensor([0.001, 0.05, 0.2, 0.5, 1.0], dtype=torch.float64)[torch.randint(5, (heads,), generator=generator)]
    how = {"causal_offset": offset} | rule
    expected = reference.topk_attention(q, k, v, retention, **how)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        out = shadowattn.sparse_attention(q, k, v, retention, estimator="oracle", kernel="torch", **how)
        torch.testing.assert_close(out, expected, atol=3e-5, rtol=3e-5)
        if native.library() is None:
            return
        with native.forced_level(level):
            out = shadowattn.sparse_attention(q, k, v, retention, estimator="oracle", kernel="native", **how)
            torch.testing.assert_close(out, expected, atol=3e-5, rtol=3e-5)
            graphs = shadowattn.sparse_attention(q, k, v, retention, estimator="int8", kernel="native", **how)
            fused = shadowattn.sparse_attention(q, k, v, retention, estimator="int8_fused", kernel="native", **how)
            torch.testing.assert_close(fused, graphs, atol=3e-5, rtol=3e-5)
    finally:
        torch.set_num_threads(before)
