"""Rows that choose their own keys and attend to them in one task: the lists are the exact integers' best."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.kernels import native, ops
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, Selection
from tests.kernels.exact import attention_float64, hidden_by_lists
from tests.tensors import HEADS, qkv

BUILT = native.library() is not None
LEVELS = native.levels()
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
KINDS = ["normal", "outlier key", "equal keys", "trend", "jumping rows", "few levels", "large dimension"]

pytestmark = pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")


def layer(kind: str, count: int, groups: int, rows: int, keys: int, dim: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Tensors whose k-th products neighbouring rows share, or do not share at all."""
    q, k, v = qkv(count, groups, rows, keys, dim, seed=seed)
    if kind == "outlier key":  # as the first token of a real model, whose score is far above all others
        k[:, 0] = 20 * q[0, 0]
    if kind == "equal keys":
        k[:] = k[:, :1]
    if kind == "trend":
        k += torch.linspace(-3, 3, keys)[:, None]
    if kind == "jumping rows":
        q *= torch.tensor([1.0, -30.0, 1e-3, 7.0])[torch.arange(rows) % 4][:, None]
    if kind == "few levels":
        q, k = q.sign(), k.sign()
    if kind == "large dimension":  # most keys have one of few products, and rows differ much in which
        k[:, :, 0] += 100
    return q, k, v


def quantised(x, scales):
    return torch.round(x.float() / scales[:, None, None]).clamp(-127, 127).double()


def chosen_alone(q, k, v, q_scales, packed, kv, retention, rule, lists):
    """The lists where nothing attends, as the cost of choosing is timed."""
    indices, kept = torch.empty(lists.size, dtype=torch.int32), torch.empty(1, dtype=torch.int64)
    native.fused_rows(
        q, k, v, None, kept, q_scales=q_scales, packed=packed, kv_head=kv, positions=lists.positions, retention=retention,
        min_budget=rule.min_budget, scale=0.3, sinks=lists.sinks, recent=lists.recent, self_first=lists.self_first,
        indices=indices,
    )  # fmt: skip
    assert kept == lists.size
    return indices


def budgets(retention, rule):
    """What `ops.attend_chosen` takes of them."""
    return retention, rule.min_budget, rule.sinks, rule.recent, rule.recent > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@given(
    kind=st.sampled_from(KINDS),
    dim=st.sampled_from([8, 24, 40, 64, 80, 128, 160, 256]),
    heads=st.sampled_from(HEADS),
    rows=st.sampled_from([1, 3, 8, 17, 26]),
    earlier=st.sampled_from([0, 1, 63, 200, 700, 4090]),  # from 4096 keys on a sample gives the first guess
    retention=st.sampled_from([0.001, 0.02, 0.05, 0.2, 0.5, 1.0]),
    sinks=st.sampled_from([0, 0, 2, 50]),
    recent=st.sampled_from([0, 0, 3, 50]),
    min_budget=st.sampled_from([1, 1, 40]),
    strided=st.booleans(),
    threads=st.sampled_from([1, 1, 3]),
    seed=st.integers(0, 99),
)
def test_rows_attend_to_their_best_keys(
    level, dtype, kind, dim, heads, rows, earlier, retention, sinks, recent, min_budget, strided, threads, seed
):
    count, groups = heads
    keys, positions = rows + earlier, earlier + torch.arange(rows)
    q, k, v = (x.to(dtype) for x in layer(kind, count, groups, rows, keys, dim, seed))
    if strided:
        k, v = (torch.cat([x, x], 1).transpose(0, 1).contiguous().transpose(0, 1)[:, :keys] for x in (k, v))
    q_scales, k_scales = (x.float().abs().amax((1, 2)) / 127 for x in (q, k))
    retentions = torch.linspace(retention / 2, retention, count, dtype=torch.float64)
    rule = Rule(sinks=sinks, recent=recent, min_budget=min_budget)
    lists, kv = rule.lists(retentions, positions), Heads.all(count, groups).kv
    plan = budgets(retentions, rule)
    packed = torch.zeros(groups, -(-keys // 32) * 2, dim // 4, 16, 4, dtype=torch.uint8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with native.forced_level(level):
            ops.pack(k, k_scales, packed, 0, None)
            out, indices, kept = ops.attend_chosen(q, k, v, q_scales, packed, kv, positions, *plan, 0.3, lists.size)
            again, none, kept_again = ops.attend_chosen(q, k, v, q_scales, packed, kv, positions, *plan, 0.3)
            measured = ops.attend_chosen(q, k, v, None, packed, kv, positions, *plan, 0.3, lists.size)
            chosen = chosen_alone(q, k, v, q_scales, packed, kv, retentions, rule, lists)
    finally:
        torch.set_num_threads(before)
    products = quantised(q, q_scales) @ quantised(k, k_scales)[kv].transpose(1, 2)
    assert indices.equal(TorchKernels().select(products.float(), lists).indices)
    assert chosen.equal(indices)
    assert measured[0].equal(out)
    assert measured[1].equal(indices)
    assert len(none) == 0
    assert kept.item() == kept_again.item() == lists.size
    assert again.equal(out)
    selection = Selection(indices, lists.indptr, positions, 1)
    expected = attention_float64(q, k, v, hidden_by_lists(selection, keys), 0.3)
    largest = float((q.double() @ k.double().repeat_interleave(count // groups, 0).transpose(1, 2)).abs().max()) * 0.3
    tolerance = TOLERANCE[dtype] * float(v.abs().max()) + 1e-6 * largest
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("retention", [0.002, 0.05, 0.3])  # with the first, rows together keep fewer keys than there are
def test_a_task_of_many_rows_goes_through_several_windows(level, dtype, retention):
    """256 rows of a head are one task where one thread works; the last of 300 are another."""
    q, k, v = (x.to(dtype) for x in qkv(2, 1, 300, 2048, 64, seed=4))
    q_scales, k_scales = (x.float().abs().amax((1, 2)) / 127 for x in (q, k))
    positions, kv = 1748 + torch.arange(300), Heads.all(2, 1).kv
    retentions = torch.full((2,), retention, dtype=torch.float64)
    lists, plan = Rule().lists(retentions, positions), budgets(retentions, Rule())
    packed = torch.zeros(1, 128, 16, 16, 4, dtype=torch.uint8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with native.forced_level(level):
            ops.pack(k, k_scales, packed, 0, None)
            out, indices, _ = ops.attend_chosen(q, k, v, q_scales, packed, kv, positions, *plan, 0.125, lists.size)
    finally:
        torch.set_num_threads(before)
    products = quantised(q, q_scales) @ quantised(k, k_scales)[kv].transpose(1, 2)
    assert indices.equal(TorchKernels().select(products.float(), lists).indices)
    expected = attention_float64(q, k, v, hidden_by_lists(Selection(indices, lists.indptr, positions, 1), 2048), 0.125)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype] * 5, rtol=TOLERANCE[dtype])


def alike(heads: tuple[int, int], rows: int, keys: int, dim: int, difference: float, seed: int) -> tuple[torch.Tensor, ...]:
    """Tensors whose rows differ little, as those of a text do, so that many keep the same keys."""
    q, k, v = qkv(*heads, rows, keys, dim, seed=seed)
    return q[:, :1] + difference * q, k, v


def chosen(
    q, k, v, retention: float, level: str, threads: int, *, scale: float = 0.125, sinks: int = 0, packed_k=None
) -> tuple[torch.Tensor, Selection]:
    """What the last rows attend to, and the lists, by integers of k or of `packed_k`."""
    packed_k = k if packed_k is None else packed_k
    (count, rows, dim), (groups, keys) = q.shape, k.shape[:2]
    positions, kv = keys - rows + torch.arange(rows), Heads.all(count, groups).kv
    retentions, rule = torch.full((count,), retention, dtype=torch.float64), Rule(sinks=sinks)
    lists, plan = rule.lists(retentions, positions), budgets(retentions, rule)
    q_scales, k_scales = (x.float().abs().amax((1, 2)) / 127 for x in (q, packed_k))
    packed, before = torch.zeros(groups, -(-keys // 32) * 2, dim // 4, 16, 4, dtype=torch.uint8), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with native.forced_level(level):
            ops.pack(packed_k, k_scales, packed, 0, None)
            out, indices, _ = ops.attend_chosen(q, k, v, q_scales, packed, kv, positions, *plan, scale, lists.size)
    finally:
        torch.set_num_threads(before)
    return out, Selection(indices, lists.indptr, positions, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@given(
    dim=st.sampled_from([8, 24, 40, 64, 80, 128, 256]),
    heads=st.sampled_from(HEADS),
    rows=st.sampled_from([8, 40, 63, 64, 65, 71, 128, 200, 300]),
    earlier=st.sampled_from([0, 1, 63, 700, 1900]),
    difference=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    retention=st.sampled_from([0.02, 0.1, 0.2, 0.5, 1.0]),
    scale=st.sampled_from([0.125, 0.125, 1.0, 0.0, -0.3]),
    sinks=st.sampled_from([0, 2]),
    seed=st.integers(0, 99),
)
def test_rows_attend_together_to_what_many_of_them_keep(
    level, dtype, dim, heads, rows, earlier, difference, retention, scale, sinks, seed
):
    """From 64 rows on; how many threads there are changes no bit, with fewer rows neither."""
    q, k, v = (x.to(dtype) for x in alike(heads, rows, rows + earlier, dim, difference, seed))
    out, selection = chosen(q, k, v, retention, level, 1, scale=scale, sinks=sinks)
    expected = attention_float64(q, k, v, hidden_by_lists(selection, rows + earlier), scale)
    sums = abs(scale) * float((q.double().abs() @ k.double().abs().repeat_interleave(heads[0] // heads[1], 0).mT).max())
    tolerance = (TOLERANCE[dtype] + 12 * 2**-24 * sums) * float(v.abs().max())  # as of a first look's blocks
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=TOLERANCE[dtype])
    for threads in (2, 16):
        assert chosen(q, k, v, retention, level, threads, scale=scale, sinks=sinks)[0].equal(out)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "strided"), [(24, True), (64, True), (64, False)])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_no_row_beside_those_that_keep_it(level, dtype, dim, strided, which, value):
    """Also where most rows of a block keep it: key 3 of the second key head, which all but every fifth row rank high. Also where
    keys do not follow one another in memory."""
    q, k, v = (x.to(dtype) for x in alike((2, 2), 130, 600, dim, 0.3, seed=1))
    k[1, 3] = 2 * q[1, 0]
    q[:, ::5] *= -1
    packed_k = k
    k, v = (torch.cat([x, x], 2)[..., :dim] if strided else x.clone() for x in (k, v))
    {"k": k, "v": v}[which][1, 3, dim - 3] = value
    out, selection = chosen(q, k, v, 0.2, level, 1, packed_k=packed_k)
    keeps = torch.tensor([3 in one.tolist() for one in selection.indices.split(selection.indptr.diff().tolist())])[130:]
    assert keeps.equal(torch.arange(130) % 5 > 0)
    if which == "k" and value == float("inf"):  # a score of −∞ has no weight
        keeps = keeps & (q[1, :, dim - 3] > 0)
    reached = ~out.isfinite().all(-1)
    assert not reached[0].any()
    assert reached[1].equal(keeps)


def arguments() -> dict:
    """Of 6 rows of 4 heads, 34 keys before them."""
    q, k, v = qkv(4, 2, 6, 40, 16)
    retention, positions = torch.full((4,), 0.3, dtype=torch.float64), 34 + torch.arange(6)
    return {
        "q": q, "k": k, "v": v, "q_scales": torch.ones(4), "packed": torch.zeros(2, 4, 4, 16, 4, dtype=torch.uint8),
        "kv_head": Heads.all(4, 2).kv, "positions": positions, "retention": retention, "min_budget": 1, "sinks": 0, "recent": 0,
        "self_first": False, "scale": 0.25, "size": Rule().lists(retention, positions).size,
    }  # fmt: skip


def test_it_is_what_torch_expects_of_an_operator():
    torch.library.opcheck(ops.attend_chosen.operator, (), arguments(), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"retention": torch.zeros(4, dtype=torch.float64)}, r"retention: expected values in \(0, 1\]"),
        ({"retention": torch.full((4,), float("nan"), dtype=torch.float64)}, r"retention: expected values in \(0, 1\]"),
        ({"retention": torch.ones(4)}, "retention: expected float64"),
        ({"retention": torch.ones(3, dtype=torch.float64)}, "retention: expected 4 values"),
        ({"min_budget": 0}, "min_budget: expected an integer of 1"),
        ({"size": 5}, "size: expected the length of all lists, 280, got 5"),
        ({"positions": torch.tensor([34, 33, 36, 37, 38, 39])}, "positions: expected ascending"),
        ({"positions": 35 + torch.arange(6)}, "positions: expected ascending values of 0 … 39"),
        ({"packed": torch.zeros(1, 4, 4, 16, 4, dtype=torch.uint8)}, "packed: expected as many key heads as k has, 2, got 1"),
    ],
)
def test_what_it_cannot_attend_to_is_refused(changed, message):
    with pytest.raises(InputError, match=message):
        ops.attend_chosen(**arguments() | changed)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_whose_scale_would_not_be_finite_are_refused(level, value, dtype):
    changed = {x: arguments()[x].to(dtype) for x in "qkv"} | {"q_scales": None}
    with native.forced_level(level):
        ops.attend_chosen(**arguments() | changed)
        changed["q"][3, 2, 15] = value
        with pytest.raises(InputError, match="expected finite q and k, got NaN or infinity"):
            ops.attend_chosen(**arguments() | changed)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_finite_reaches_the_rows_that_keep_it_and_no_other(level):
    q, k, v = qkv(1, 1, 6, 6, 16)
    packed = torch.zeros(1, 2, 4, 16, 4, dtype=torch.uint8)
    k[0, 4, 3] = float("nan")
    plan = budgets(torch.ones(1, dtype=torch.float64), Rule())
    with native.forced_level(level):
        out, _, _ = ops.attend_chosen(
            q, k, v, torch.ones(1), packed, torch.zeros(1, dtype=torch.int64), torch.arange(6), *plan, 1.0
        )
    assert out[:, :4].isfinite().all()
    assert out[:, 4:].isnan().all()
