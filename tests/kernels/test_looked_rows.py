"""Rows that choose from what a first look lets through: the lists of the estimator's torch form, exact attention on them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.graphs.symmetric_int8 import absmax_scales
from shadowattn.kernels import native, ops
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.selection import Rule
from shadowattn.types import FirstLookLosses
from tests.kernels.exact import attention_float64, hidden_by_lists
from tests.kernels.test_fused_rows import KINDS, TOLERANCE, layer
from tests.tensors import HEADS, qkv

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", native.levels())
@given(
    kind=st.sampled_from(KINDS),
    dim=st.sampled_from([8, 24, 64, 72, 80, 128, 200, 256]),
    heads=st.sampled_from(HEADS),
    rows=st.sampled_from([1, 8, 17, 70, 150]),
    earlier=st.sampled_from([0, 1, 63, 700, 4090]),
    retention=st.sampled_from([0.001, 0.02, 0.05, 0.2, 0.5, 1.0]),
    candidates=st.sampled_from([1.0, 2.0, 3.7]),
    block_rows=st.sampled_from([8, 16, 24, 64]),
    rule=st.builds(
        Rule, sinks=st.sampled_from([0, 2, 50]), recent=st.sampled_from([0, 3, 90]), min_budget=st.sampled_from([1, 1, 40])
    ),
    flat_share=st.sampled_from([0.0, 0.5, 1.0]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_rows_attend_to_their_best_of_what_is_let_through(
    level, dtype, kind, dim, heads, rows, earlier, retention, candidates, block_rows, rule, flat_share, threads, seed
):
    count, groups = heads
    keys = rows + earlier
    q, k, v = (x.to(dtype) for x in layer(kind, count, groups, rows, keys, dim, seed))
    retentions = torch.linspace(retention / 2, retention, count, dtype=torch.float64)
    chunk = Chunk.of(q, k, v, retention=retentions, scale=0.3)
    losses = FirstLookLosses([list(range(count))], candidates, block_rows)
    estimator = Hierarchical(candidates=candidates, block_rows=block_rows, flat_share=flat_share, first_look=losses)
    lists = rule.lists(chunk.retention, chunk.positions)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with native.forced_level(level):
            out, selection = estimator.attend(chunk, rule, lambda: lists, listed=True)
            again, kept = estimator.attend(chunk, rule, lambda: lists, listed=False)
    finally:
        torch.set_num_threads(before)
    assert kept == lists.size
    assert again.equal(out)
    assert selection.indices.equal(estimator.select(chunk, rule, lists, TorchKernels()).indices)
    expected = attention_float64(q, k, v, hidden_by_lists(selection, keys), 0.3)
    sums = float((q.double().abs() @ k.double().abs().repeat_interleave(count // groups, 0).transpose(1, 2)).max()) * 0.3
    tolerance = (TOLERANCE[dtype] + 12 * 2**-24 * sums) * float(v.abs().max())  # a block sums a product in one lane, term by term
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype):
    """At the start of a prompt some blocks of every head let all keys through, and one head is spared."""
    q, k, v = (x.to(dtype) for x in qkv(4, 2, 300, 300, 64))
    v[1, 200] = torch.inf
    losses = FirstLookLosses([[0.0, 0.0, 1.0, 0.0]], 1.5, 16)
    estimator = Hierarchical(candidates=1.5, block_rows=16, flat_share=0.25, first_look=losses)
    chunk, outputs, before = Chunk.of(q, k, v, retention=0.5), [], torch.get_num_threads()
    lists = Rule().lists(chunk.retention, chunk.positions)
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            outputs.append(estimator.attend(chunk, Rule(), lambda: lists, listed=True))
    finally:
        torch.set_num_threads(before)
    for out, selection in outputs:
        assert out.view(torch.uint8).equal(outputs[0][0].view(torch.uint8))
        assert selection.indices.equal(outputs[0][1].indices)
    keep = [200 in keys.tolist() for keys in selection.indices.split(lists.indptr.diff().tolist())]
    assert out.isfinite().all(-1)[2].tolist() == [not kept for kept in keep[600:900]]  # its rows attend each for itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize("rows", [40, 63, 130])  # of fewer than 64 rows none attend together
def test_the_number_of_threads_changes_no_bit_of_rows_that_are_alike(rows, block_rows, dtype):
    q, k, v = qkv(4, 2, rows, 500 + rows, 64)
    q, k, v = (x.to(dtype) for x in (q[:, :1] + 0.1 * q, k, v))
    losses = FirstLookLosses([[0.0, 1.0, 1.0, 0.0]], 1.5, block_rows)
    estimator = Hierarchical(candidates=1.5, block_rows=block_rows, flat_share=0.5, first_look=losses)
    outputs, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 16):
            torch.set_num_threads(threads)
            chunk = Chunk.of(q, k, v, retention=0.3)
            outputs.append(estimator.attend(chunk, Rule(), lambda: None, listed=False)[0])
    finally:
        torch.set_num_threads(before)
    assert all(out.equal(outputs[0]) for out in outputs)


def arguments() -> dict:
    """Of 20 rows of 4 heads in two blocks, 40 keys before them."""
    q, k, v = qkv(4, 2, 20, 60, 16)
    chunk, estimator = Chunk.of(q, k, v, retention=0.2), Hierarchical(block_rows=16)
    lists, keys = Rule().lists(chunk.retention, chunk.positions), estimator.packed(chunk, twice=True)
    return {
        "q": q, "k": k, "v": v, "q_scales": torch.ones(4), "packed": keys.packed, "kv_head": chunk.heads.kv,
        "positions": chunk.positions, "retention": chunk.retention, "min_budget": 1, "sinks": 0, "recent": 0,
        "self_first": False, "scale": 0.25, "size": lists.size, "first_rows": 16, "near": 16, "candidates": 2.0,
        "spared": torch.zeros(4, dtype=torch.bool), "by_key": keys.by_key,
    }  # fmt: skip


@pytest.mark.parametrize("scales", [torch.ones(4), None], ids=["scales", "measured"])
def test_it_is_what_torch_expects_of_an_operator(scales):
    given = arguments() | {"q_scales": scales}
    torch.library.opcheck(ops.attend_chosen.operator, (), given, test_utils=("test_schema", "test_faketensor"))


def test_scales_that_are_not_given_are_those_of_the_rows():
    given = arguments()
    expected = ops.attend_chosen(**given | {"q_scales": absmax_scales(given["q"])})
    assert all(x.equal(y) for x, y in zip(ops.attend_chosen(**given | {"q_scales": None}), expected, strict=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"first_rows": 0}, "first_rows: expected an integer of 8 … 64, got 0"),
        ({"first_rows": 20}, "first_rows: expected a multiple of 8, got 20"),
        ({"near": 0}, "near: expected an integer of 1"),
        ({"recent": 20}, "near: expected an integer of 20"),
        ({"by_key": None}, "expected first_rows, spared and by_key, got some of them"),
        ({"candidates": 0.9}, "candidates: expected a number of 1 … inf, got 0.9"),
        ({"spared": torch.zeros(3, dtype=torch.bool)}, "spared: expected 4 values"),
        ({"spared": torch.zeros(4)}, "spared: expected bool"),
        (
            {"by_key": torch.zeros(2, 59, 16, dtype=torch.uint8)},
            r"by_key: expected \[G, K or more, D\] of \[2, 60, 16\]",
        ),
        ({"by_key": torch.zeros(2, 16, 60, dtype=torch.uint8).mT}, "by_key: expected one key after another"),
    ],
)
def test_what_would_leave_a_row_without_keys_is_refused(changed, message):
    with pytest.raises(InputError, match=message):
        ops.attend_chosen(**arguments() | changed)


def test_rows_that_do_not_stand_one_after_another_see_what_their_block_lets_through():
    """Between a block's rows there are keys that none of them is at: they are let through as well."""
    q, k, v = qkv(2, 1, 9, 300, 16)
    positions = torch.tensor([20, 21, 60, 61, 62, 150, 200, 298, 299])
    chunk = Chunk.of(q, k, v, retention=0.3, positions=positions)
    rule, estimator = Rule(), Hierarchical(block_rows=8)
    lists = rule.lists(chunk.retention, chunk.positions)
    _, selection = estimator.attend(chunk, rule, lambda: lists, listed=True)
    assert selection.indices.equal(estimator.select(chunk, rule, lists, TorchKernels()).indices)


def test_a_key_that_is_not_finite_reaches_the_rows_that_keep_it_and_no_other():
    given = arguments()
    given["k"][:, 50, 3] = float("nan")  # the own key of row 10
    out, indices, _ = ops.attend_chosen(**given)
    ends, keeps = Rule().lists(given["retention"], given["positions"]).indptr.tolist(), []
    for first, end in zip(ends, ends[1:], strict=False):
        keeps.append(bool((indices[first:end] == 50).any()))
    keeps = torch.tensor(keeps).view(4, 20)
    assert keeps.any()
    assert not keeps.all()
    assert out.isnan().any(-1).equal(keeps)


@pytest.mark.parametrize("candidates", [1e15, 1e18, 1e30, 1e300])
def test_more_candidates_than_there_are_integers_let_every_key_through(candidates):
    q, k, v = qkv(2, 1, 100, 700, 16)
    chunk, estimator = Chunk.of(q, k, v, retention=0.1), Hierarchical(candidates=candidates)
    lists = Rule().lists(chunk.retention, chunk.positions)
    _, selection = estimator.attend(chunk, Rule(), lambda: lists, listed=True)
    assert selection.indices.equal(estimator.select(chunk, Rule(), lists, TorchKernels()).indices)
    assert selection.indices.equal(Int8Fused().attend(chunk, Rule(), lambda: lists, listed=True)[1].indices)


def test_keys_of_more_heads_than_there_is_room_for_are_refused():
    k = torch.randn(3, 20, 16)
    with pytest.raises(InputError, match="packed: expected as many heads as k has, 3, got 2"):
        ops.pack(k, torch.ones(3), torch.zeros(2, 4, 4, 16, 4, dtype=torch.uint8), 0, None)
