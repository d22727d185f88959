"""A decoding step on lists that the heads of a key head share: scores by their definition in float64, at every level."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.graphs.symmetric_int8 import absmax_scales, quantise
from shadowattn.kernels import native, ops
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, ScaleGrid, Selection
from tests.kernels.exact import attention_float64, hidden_by_lists
from tests.tensors import HEADS, qkv

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")


def packed_keys(k):
    groups, keys, dim = k.shape
    packed = torch.zeros(groups, -(-keys // 32) * 2, dim // 4, 16, 4, dtype=torch.uint8)
    ops.pack(k, absmax_scales(k), packed, 0, None)
    return packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", native.levels())
@given(
    dim=st.sampled_from([8, 24, 64, 128, 256]),
    heads=st.sampled_from([*HEADS, (14, 2), (20, 2)]),
    keys=st.sampled_from([1, 2, 31, 200, 2047, 2049, 5000]),
    offset=st.sampled_from([0.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_scores_are_those_of_the_definition(level, dtype, dim, heads, keys, offset, seed):
    count, groups = heads
    q, k, _ = (x.to(dtype) for x in qkv(count, groups, 1, keys, dim, seed=seed))
    k[:, :, 0] += offset  # a large product that all keys have alike
    q_scales, kv = absmax_scales(q), torch.arange(groups).repeat_interleave(count // groups)
    products = quantise(q, q_scales).double() @ quantise(k, absmax_scales(k)).double()[kv].transpose(1, 2)
    spread = products.std(2, keepdim=True, correction=0)
    alike = spread <= 1e-6 * products.abs().amax(2, keepdim=True)
    expected = torch.where(alike, 0.0, products / spread).view(groups, -1, 1, keys).sum(1)
    with native.forced_level(level):
        found = ops.shared_scores(q, q_scales, packed_keys(k), keys)
    largest = float(torch.where(alike, 0.0, products / spread).abs().amax())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6 * largest * count)


def test_threads_change_no_score_and_no_list():
    q, k, v = qkv(15, 3, 1, 5000, 64)  # tasks for more threads than there are key heads
    scales, packed, before, found = absmax_scales(q), packed_keys(k), torch.get_num_threads(), []
    outs = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            for _ in range(20):  # threads take turns in another order each time
                out, chosen = ops.attend_shared(q, k, v, scales, packed, [700, 1, 2300], 2, 3, True, 0.3)
                found.append((ops.shared_scores(q, scales, packed, 5000), chosen))
                outs.append(out)
    finally:
        torch.set_num_threads(before)
    assert all(scores.equal(found[0][0]) and chosen.equal(found[0][1]) for scores, chosen in found)
    for out in outs:  # sums over parts of a list, whose number goes by that of the threads
        torch.testing.assert_close(out, outs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", native.levels())
@given(
    dim=st.sampled_from([8, 24, 64, 128, 256]),
    heads=st.sampled_from([*HEADS, (14, 2), (20, 2), (17, 1)]),
    keys=st.sampled_from([1, 2, 31, 200, 5000]),
    strided=st.booleans(),
    sinks=st.sampled_from([0, 2]),
    recent=st.sampled_from([0, 3]),
    retention=st.sampled_from([0.001, 0.2, 1.0]),
    seed=st.integers(0, 99),
)
def test_heads_attend_to_the_best_keys_by_these_scores(level, dtype, dim, heads, keys, strided, sinks, recent, retention, seed):
    count, groups = heads
    q, k, v = (x.to(dtype) for x in qkv(count, groups, 1, keys, dim, seed=seed))
    if strided:  # neighbouring dimensions lie apart
        q, k, v = (x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v))
    chunk, estimator = Chunk.of(q, k, v, scale=0.3), Int8Fused.of(q, k)
    lists = Rule(sinks=sinks, recent=recent).lists(torch.full((groups,), retention, dtype=torch.float64), chunk.positions)
    plan = (lists.indptr.diff().tolist(), lists.sinks, lists.recent, lists.self_first)
    packed, q_scales = packed_keys(k), absmax_scales(q)
    with native.forced_level(level):
        scores = ops.shared_scores(q, q_scales, packed, keys)
        out, chosen = ops.attend_shared(q, k, v, q_scales, packed, *plan, 0.3)
        of_estimator = estimator.attend_shared(chunk, lists, NativeKernels())
    assert chosen.equal(NativeKernels().select(scores, lists).indices)
    torch.testing.assert_close(scores, estimator.shared_scores(chunk), atol=1e-5 * count, rtol=1e-5)
    rows = Selection(chosen, lists.indptr, torch.full((count // groups,), keys - 1), count // groups)
    expected = attention_float64(q.reshape(groups, -1, dim), k, v, hidden_by_lists(rows, keys), 0.3).view(q.shape)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    assert of_estimator.equal(out)


def test_a_head_whose_keys_are_alike_has_no_say():
    q, k, _ = qkv(4, 2, 1, 300, 64)
    k[0] = k[0, :1]
    scores = ops.shared_scores(q, absmax_scales(q), packed_keys(k), 300)
    assert not scores[0].any()
    assert scores[1].any()


def test_the_operator_says_what_it_makes_and_refuses_what_it_cannot_read():
    q, k, v = qkv(4, 2, 1, 300, 64)
    packed, scales = packed_keys(k), absmax_scales(q)
    torch.library.opcheck(ops.shared_scores.operator, (q, scales, packed, 300), test_utils=("test_schema", "test_faketensor"))
    plan = ([60, 1], 0, 0, False)
    torch.library.opcheck(
        ops.attend_shared.operator, (q, k, v, scales, packed, *plan, 0.3), test_utils=("test_schema", "test_faketensor")
    )
    for counts in ([60], [60, 0], [60, 301]):
        with pytest.raises(InputError, match="counts: expected 1 … 300 keys for each of 2 key heads"):
            ops.attend_shared(q, k, v, scales, packed, counts, *plan[1:], 0.3)
    with pytest.raises(InputError, match="sinks"):
        ops.attend_shared(q, k, v, scales, packed, plan[0], -1, *plan[2:], 0.3)
    with pytest.raises(InputError, match="packed: expected as many key heads as k has, 2, got 1"):
        ops.attend_shared(q, k, v, scales, packed[:1], *plan, 0.3)
    with pytest.raises(InputError, match="as many heads for each of 0 key heads"):
        ops.shared_scores(q, scales, packed[:0], 300)
    with pytest.raises(InputError, match=r"expected q \[H, Q, D\], k and v \[G, K, D\]"):
        ops.attend_shared(q, k, v[:, 1:], scales, packed, *plan, 0.3)
    for wrong, message in (
        ((q[:3], scales[:3], packed, 300), r"q: expected \[H, 1, D\], as many heads for each of 2 key heads, got \[3, 1, 64\]"),
        ((q.expand(4, 2, 64), scales, packed, 300), r"got \[4, 2, 64\]"),
        ((q, scales, packed, 400), "packed: expected room for 416 keys"),
        ((q, scales[:3], packed, 300), "scales"),
    ):
        with pytest.raises(InputError, match=message):
            ops.shared_scores(*wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", native.levels())
@given(
    dim=st.sampled_from([8, 24, 64, 256]),
    magnitude=st.sampled_from([1.0, 0.0, 1e-42, 1e30]),
    heads=st.sampled_from(HEADS),
    seed=st.integers(0, 99),
)
def test_scales_that_are_measured_on_the_way_are_those_of_the_row(level, dtype, dim, magnitude, heads, seed):
    count, groups = heads
    q, k, v = (x.to(dtype) for x in qkv(count, groups, 1, 300, dim, seed=seed))
    q = (q * magnitude).to(dtype)
    plan = ([30] * groups, 1, 2, True, 1e-30)
    with native.forced_level(level):
        out, chosen = ops.attend_shared(q, k, v, None, packed_keys(k), *plan)
        expected, listed = ops.attend_shared(q, k, v, absmax_scales(q), packed_keys(k), *plan)
    assert chosen.equal(listed)
    assert out.equal(expected)


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_refused_where_its_scale_is_measured(level, value):
    q, k, v = qkv(4, 2, 1, 300, 64)
    q[3, 0, 63] = value
    with native.forced_level(level), pytest.raises(InputError, match="expected finite q and k, got NaN or infinity"):
        ops.attend_shared(q, k, v, None, packed_keys(k), [60, 1], 0, 0, False, 0.3)


def test_operators_that_measure_no_scales_refuse_to_go_without():
    q, k, v = qkv(4, 2, 1, 300, 64)
    packed, one = packed_keys(k), torch.tensor([299])
    lists = Rule().lists(torch.full((4,), 0.1, dtype=torch.float64), one)
    places = (lists.candidates, lists.tail, lists.indptr, lists.size, 0, 0, False)
    kv = Heads.all(4, 2).kv
    for call in (
        lambda: ops.shared_scores(q, None, packed, 300),
        lambda: ops.estimate(q, None, packed, 300, kv, one + 1, "rows", 1),
        lambda: ops.estimate_select(q, None, packed, 300, kv, one + 1, "rows", 1, *places),
        lambda: ops.attend_chosen_blocks(q, k, v, q, None, packed, kv, one, one + 1, "rows", 1, *places, 0.3, False),
        lambda: ops.pack(k, None, packed, 0, None),
    ):
        with pytest.raises(InputError, match="scales: expected"):
            call()


@pytest.mark.parametrize("scales", ["fixed", "grid", "measured"])
def test_an_estimator_ranks_by_its_own_scales(scales):
    q, k, v = qkv(6, 2, 1, 400, 64)
    q[3:] *= 4
    chunk = Chunk.of(q, k, v, retention=0.1, scale=0.3)
    fixed = {"q_scales": torch.linspace(0.5, 3, 6), "k_scales": torch.tensor([0.2, 0.5])}  # so coarse that other keys are best
    grid = ScaleGrid((2.0,), (1.5,))
    estimator = Int8Fused(**fixed) if scales == "fixed" else Int8Fused(grid) if scales == "grid" else Int8Fused()
    lists = Rule().step_lists([0.1, 0.1], chunk.positions)
    out = estimator.attend_shared(chunk, lists, NativeKernels())
    torch.testing.assert_close(out, Estimator.attend_shared(estimator, chunk, lists, NativeKernels()), atol=1e-5, rtol=1e-5)
    other = Int8Fused.of(q, k) if scales != "measured" else Int8Fused(**fixed)
    assert (out - other.attend_shared(chunk, lists, NativeKernels())).abs().max() > 0.05


def test_lists_of_an_earlier_row_hold_no_later_key():
    q, k, v = qkv(4, 2, 1, 300, 64)
    chunk, estimator = Chunk.of(q, k, v, scale=0.3, positions=torch.tensor([99])), Int8Fused.of(q, k)
    lists = Rule().step_lists([0.5, 0.5], chunk.positions)
    out = estimator.attend_shared(chunk, lists, NativeKernels())
    v[:, 100:] = 1e6
    assert estimator.attend_shared(chunk, lists, NativeKernels()).equal(out)


def test_a_scale_that_the_processor_takes_for_0_is_refused():
    q, k, v = qkv(4, 2, 1, 300, 64)
    q[1] = 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush small numbers to 0")
    try:
        with pytest.raises(InputError, match="so small that the processor takes them for 0"):
            ops.attend_shared(q, k, v, None, packed_keys(k), [60, 1], 0, 0, False, 0.3)
    finally:
        torch.set_flush_denormal(False)
