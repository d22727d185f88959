"""Wrong kinds of arguments to every public function: refused by name, before any work. A float position once was a crash."""

import re
from contextlib import nullcontext, suppress
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shadowattn
from shadowattn import reference
from shadowattn.budget import head_retentions
from shadowattn.errors import InputError
from shadowattn.graphs import GraphForm, GraphShape
from shadowattn.kernels import choose, native, ops
from shadowattn.offline import allocate
from shadowattn.online.attention import SparseAttention
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.random import Random
from shadowattn.online.estimators.streaming import Streaming
from shadowattn.online.functional import ESTIMATORS
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, Requant, RetentionProfile, ScaleGrid
from tests.tensors import qkv

NAN, INF = float("nan"), float("inf")
# Of each: a value that looks like the right one to some function on the way, and is not.
NOT_INTEGERS = [2.0, 11.0, 0.5, True, np.True_, "4", "", None, [4], Fraction(4), 4 + 0j, NAN, INF, b"4", {}, object()]
NOT_INTEGERS += [np.float64(4), np.array(4), np.array([4]), torch.tensor(4), torch.tensor([4])]
NOT_NUMBERS = [True, np.True_, "0.5", "", None, [0.5], 0.5j, NAN, INF, -INF, b"1", {}, object(), 10**400]
NOT_NUMBERS += [np.array([0.5]), torch.tensor([0.5]), torch.tensor(0.5)]
NOT_NAMES = [None, 3, True, "", "no such thing", ["int8"], np.array(["int8"]), torch.tensor(1), b"auto", object()]
NOT_RETENTIONS = [x for x in NOT_NUMBERS if not isinstance(x, list | np.ndarray | torch.Tensor)]
NOT_RETENTIONS += [0.0, -0.2, 1.5, 2, [], ["0.2"] * 4, [True] * 4, [0.2] * 3, [0.2, 0.2, NAN, 0.2], [[0.2] * 4]]
NOT_RETENTIONS += [torch.tensor([True] * 4), torch.tensor([0.2j] * 4), torch.full((4, 1), 0.2), torch.full((3,), 0.2)]
NOT_RETENTIONS += [torch.full((4,), NAN), torch.full((4,), 0.2, device="meta"), np.array(["0.2"] * 4), np.full((2, 2), 0.2)]
NOT_RETENTIONS += [torch.full((4,), 0.2, requires_grad=True)]


def not_tensors(x: torch.Tensor) -> list:
    """What is no dense float tensor of three axes in the CPU's memory with finite values."""
    wrong = [x.numpy(), x.tolist(), None, "q", 1.0, x.to_sparse(), x.to("meta"), x[0], x[None], x[:0], x[..., :0], object()]
    wrong.append(torch._neg_view(x))
    wrong += [x.to(dtype) for dtype in (torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)]
    wrong += [torch.where(x == x[0, 0, 0], value, x) for value in (NAN, INF, -INF)]
    return [*wrong, x.double() * 1e200]


def test_a_name_of_each_is_an_argument():
    """So that the tests below break where one is renamed."""
    assert shadowattn.sparse_attention.__kwdefaults__.keys() >= {"estimator", "query_block", "kernel", "scale", "sinks"}
    assert set(ESTIMATORS) >= {"int8", "int8_fused", "oracle", "quantised", "streaming", "random"}


FLOAT32 = torch.finfo(torch.float32)
ATTENTION = [
    *(("causal_offset", x) for x in [*NOT_INTEGERS, -1, 7, 10**30]),
    *((name, x) for name in ("query_block", "sinks", "recent", "min_budget") for x in [*NOT_INTEGERS, -1, 10**30]),
    ("query_block", 0),
    ("min_budget", 0),
    *(("scale", x) for x in [*NOT_NUMBERS, 0, 0.0, -0.125, 1e-60, 1e39] if x is not None),
    *((name, x) for name in ("kernel", "block_score", "estimator") for x in NOT_NAMES),
    *(("retention", x) for x in NOT_RETENTIONS),
    ("estimator", Oracle),
    ("estimator", GraphForm()),
]


def shown(value) -> str:
    return re.sub(r"0x\w+", "", repr(value))[:40]


@pytest.mark.parametrize(("name", "value"), ATTENTION, ids=[f"{name} {shown(value)}" for name, value in ATTENTION])
def test_sparse_attention_refuses(name, value, monkeypatch):
    monkeypatch.setattr("shadowattn.online.functional.run_batched", None)  # no work is done
    q, k, v = qkv(4, 2, 4, 10, 8)
    for estimator in ESTIMATORS:
        options = {"retention": 0.5, "causal_offset": 6, "estimator": estimator} | {name: value}
        with pytest.raises(InputError, match=name.replace("_", r"_")):
            shadowattn.sparse_attention(q, k, v, options.pop("retention"), **options)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("wrong", range(len(not_tensors(torch.ones(2, 2, 2)))))
def test_attention_refuses_tensors_that_do_not_fit(wrong, which):
    tensors = list(qkv(4, 2, 4, 10, 8))
    tensors[which] = not_tensors(tensors[which])[wrong]
    for call in (
        lambda: shadowattn.sparse_attention(*tensors, 0.5, causal_offset=6),
        lambda: shadowattn.sparse_attention(*tensors, 0.5, causal_offset=6, estimator="oracle", kernel="torch"),
        lambda: reference.topk_attention(*tensors, 0.5, causal_offset=6),
        lambda: reference.dense_attention(*tensors, causal_offset=6),
    ):
        with pytest.raises(InputError):
            call()


def test_attention_refuses_products_that_leave_float32():
    """Their softmax would be NaN."""
    q, k, v = qkv(4, 2, 4, 10, 8)
    for tensors, scale in (((1e20 * q, 1e20 * k, v), 0.3), ((q, k, v), 1e38)):
        for call in (shadowattn.sparse_attention, reference.topk_attention):
            with pytest.raises(InputError, match="within float32"):
                call(*tensors, 0.5, causal_offset=6, scale=scale)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sparse_attention_refuses_mixed_dtypes(dtype, which):
    tensors = list(qkv(4, 2, 4, 10, 8))
    tensors[which] = tensors[which].to(dtype)
    with pytest.raises(InputError, match="expected q, k, v of one dtype"):
        shadowattn.sparse_attention(*tensors, 0.5, causal_offset=6)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_gradient_is_not_lost_without_a_word(which):
    tensors = qkv(4, 2, 4, 10, 8)
    tensors[which].requires_grad_()
    for kernel in ("auto", "torch"):
        with pytest.raises(InputError, match="requires it, and sparse attention has none"):
            shadowattn.sparse_attention(*tensors, 0.5, causal_offset=6, kernel=kernel)
        with torch.no_grad():
            assert not shadowattn.sparse_attention(*tensors, 0.5, causal_offset=6, kernel=kernel).requires_grad


@pytest.mark.parametrize("query_block", [1, 2, 3])
@pytest.mark.parametrize("estimator", ["int8", "oracle"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_floats_give_what_the_reference_gives(dtype, estimator, query_block):
    q, k, v = (x.to(dtype) for x in qkv(4, 2, 20, 40, 64))
    out = shadowattn.sparse_attention(q, k, v, 1.0, causal_offset=20, estimator=estimator, query_block=query_block)
    assert out.dtype == dtype
    expected = reference.dense_attention(q, k, v, causal_offset=20)
    torch.testing.assert_close(out.float(), expected, atol=2e-3 if dtype == torch.float16 else 1e-5, rtol=1e-3)


@pytest.mark.parametrize("integer", [int, np.int8, np.int32, np.int64, np.uint16])
def test_integers_of_numpy_are_integers(integer):
    q, k, v = qkv(4, 2, 40, 60, 8)
    plain = {"causal_offset": 20, "query_block": 16, "sinks": 2, "recent": 3, "min_budget": 9}
    expected = reference.topk_attention(q, k, v, 0.2, **plain, block_score="max")
    how = {name: integer(value) for name, value in plain.items()} | {"block_score": "max"}
    torch.testing.assert_close(reference.topk_attention(q, k, v, np.float64(0.2), **how), expected)
    for estimator in ("oracle", "int8", *(["int8_fused"] if native.library() else [])):
        out = shadowattn.sparse_attention(q, k, v, np.float32(0.2), estimator=estimator, scale=np.float32(8**-0.5), **how)
        with_ints = shadowattn.sparse_attention(q, k, v, 0.2, estimator=estimator, scale=8**-0.5, block_score="max", **plain)
        torch.testing.assert_close(out, with_ints)


def test_a_block_much_higher_than_the_chunk_takes_no_memory():
    """A block is padded to its full height."""
    q, k, v = qkv(4, 2, 5, 60, 8)
    for block_score in ("leading_query", "max"):
        for rows in (1, 5):
            how = {"causal_offset": 55, "estimator": "oracle", "block_score": block_score}
            huge, fitting = (
                shadowattn.sparse_attention(q[:, :rows], k, v, 0.1, query_block=block, **how) for block in (2**31 - 1, 8)
            )
            assert huge.equal(fitting)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@example(name="scale", value=274909808.0)  # one rounded product beside one that is not were far apart
@settings(max_examples=25)
@given(
    name=st.sampled_from(["causal_offset", "scale", "query_block", "sinks", "recent", "min_budget"]),
    value=st.one_of(
        st.floats(), st.text(), st.none(), st.booleans(), st.fractions(), st.binary(), st.complex_numbers(), st.lists(st.floats())
    ),
)
def test_anything_else_is_refused_or_right(name, value, estimator):
    q, k, v = qkv(2, 1, 3, 6, 32)
    options = {"causal_offset": 3} | {name: value}
    if name == "scale" and (value is None or (isinstance(value, float | Fraction) and FLOAT32.tiny <= value <= FLOAT32.max)):
        inside = value is None or 1e-37 < value < 1e30  # nearer to the ends of float32 its products with q·k may be refused
        with torch.no_grad(), nullcontext() if inside else suppress(InputError):
            expected = reference.topk_attention(q, k, v, 1.0, **options)
            torch.testing.assert_close(shadowattn.sparse_attention(q, k, v, 1.0, estimator=estimator, **options), expected)
        return
    with pytest.raises(InputError, match=name):
        shadowattn.sparse_attention(q, k, v, 0.5, estimator=estimator, **options)


@pytest.mark.parametrize("value", [x for x in NOT_RETENTIONS if not isinstance(x, list | np.ndarray | torch.Tensor)], ids=shown)
def test_reference_and_budget_refuse_retentions(value):
    q, k, v = qkv(4, 2, 4, 10, 8)
    for call in (lambda: reference.topk_attention(q, k, v, value, causal_offset=6), lambda: head_retentions(value, 4)):
        with pytest.raises(InputError, match="retention: expected"):
            call()


@pytest.mark.parametrize("value", [*NOT_INTEGERS, -1, 10**30], ids=shown)
@pytest.mark.parametrize("name", ["causal_offset", "query_block", "sinks", "recent", "min_budget"])
def test_reference_refuses_what_is_no_integer(name, value):
    q, k, v = qkv(4, 2, 4, 10, 8)
    with pytest.raises(InputError, match=f"{name}: expected"):
        reference.topk_attention(q, k, v, 0.5, **{"causal_offset": 6} | {name: value})


@pytest.mark.parametrize("change", ["scores", "NaN", "retention", "visible", "float visible", "falling visible", "rank"])
def test_reference_select_refuses_what_does_not_fit(change):
    scores, retention, visible = torch.randn(2, 3, 6), torch.full((2,), 0.5, dtype=torch.float64), torch.tensor([4, 5, 6])
    if change == "scores":
        scores = scores.int()
    elif change == "NaN":
        scores[0, 0, 0] = NAN
    elif change == "retention":
        retention = retention[:1]
    elif change == "visible":
        visible = visible + 1
    elif change == "float visible":
        visible = visible.float()
    elif change == "falling visible":
        visible = visible.flip(0)
    else:
        scores = scores[0]
    with pytest.raises(InputError):
        reference.select(scores, retention, visible, 1, "leading_query")


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=shown)
def test_allocate_refuses_what_is_no_number(value):
    given = {"head_ppl": [[20.0, 21.0]], "layer_ppl": [25.0], "base_ppl": 10.0, "retention": 0.2, "method": "uniform"}
    for name in ("base_ppl", "retention"):
        with pytest.raises(InputError, match=name):
            allocate(**given | {name: value})
    for change in ({"head_ppl": [[20.0, value]]}, {"layer_ppl": [value]}, {"head_ppl": value}):
        with pytest.raises(InputError):
            allocate(**given | change)


def test_allocate_takes_arrays_and_tensors():
    heads, layers = [[20.0, 21.0], [30.0, 40.0]], [25.0, 35.0]
    expected = allocate(heads, layers, base_ppl=10.0, retention=0.2, method="waterfill")
    for kind in (np.array, torch.tensor):
        made = allocate(kind(heads), kind(layers), base_ppl=np.float64(10.0), retention=np.float64(0.2), method="waterfill")
        assert made == expected or kind is torch.tensor  # which holds float32
    for method in NOT_NAMES:
        with pytest.raises(InputError, match="allocator: expected one of"):
            allocate(heads, layers, base_ppl=10.0, retention=0.2, method=method)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 0.0, -1.0, 1e30], ids=shown)
def test_types_refuse_what_is_no_number(value):
    for make in (
        lambda: ScaleGrid((value,), (0.02,)),
        lambda: ScaleGrid((0.02,), (0.01, value)),
        lambda: RetentionProfile(((value,),), ScaleGrid((0.02,), (0.02,)), 64, "", "", ""),
    ):
        with pytest.raises(InputError):
            make()
    if value != 1e30:
        with pytest.raises(InputError):
            Requant("fixed_output", value)


def test_types_refuse_what_is_of_another_kind():
    grid = ScaleGrid((0.02,), (0.02,))
    for make in (
        lambda: ScaleGrid(0.02, (0.02,)),
        lambda: ScaleGrid("0.02", (0.02,)),
        lambda: ScaleGrid((0.02,), (0.02,), None),
        lambda: ScaleGrid((0.02,), (0.02,), np.array(["product"])),
        lambda: RetentionProfile(0.2, grid, 64, "", "", ""),
        lambda: RetentionProfile("0.2", grid, 64, "", "", ""),
        lambda: RetentionProfile(((0.2,), (0.2, 0.2)), grid, 64, "", "", ""),
        lambda: RetentionProfile(((0.2,),), ((0.02,), (0.02,)), 64, "", "", ""),
        lambda: RetentionProfile(((0.2,),), grid, 64.0, "", "", ""),
        lambda: RetentionProfile(((0.2,),), grid, 64, None, "", ""),
        lambda: Rule(block_score=np.array(["max"])),
    ):
        with pytest.raises(InputError):
            make()
    assert RetentionProfile([np.array([0.2, 0.5])], grid, np.int64(64), "", "", "").retention == ((0.2, 0.5),)
    assert GraphShape(*np.array([2, 8, 64, 32])) == GraphShape(2, 8, 64, 32)


PREFILL = [
    *(("chunk_tokens", x) for x in [*NOT_INTEGERS, 0, -1]),
    *((name, x) for name in ("kernel", "decode", "block_score") for x in NOT_NAMES),
    *(("dense_above", x) for x in [*NOT_NUMBERS, 0.0, 1.5]),
    *(("retention", x) for x in (0.2, None, [], [[]], "0.2", [["0.2"]], [[True]], [[0.2], [0.2, 0.3]], [[NAN]], [[0.0]])),
    *(("estimator", x) for x in (None, "oracle", Oracle, GraphForm())),
    *(("pipeline", x) for x in ("overlap", 3)),
    *(("observers", x) for x in (3, [None], print)),
]


@pytest.mark.parametrize(("name", "value"), PREFILL, ids=[f"{name} {shown(value)}" for name, value in PREFILL])
def test_prefill_refuses_options_that_do_not_fit(name, value):
    options = {"retention": [[0.2, 0.2]], "estimator": Oracle()} | {name: value}
    with pytest.raises(InputError, match=name):
        SparseAttention(**options)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_prefill_refuses_tensors_and_layers_that_do_not_fit(which):
    prefill, tensors = SparseAttention([[0.2] * 4], Oracle()), [x[None] for x in qkv(4, 2, 4, 10, 8)]
    for layer in (1, -1, 0.0, None, True):
        with pytest.raises(InputError, match="layer"):
            prefill(layer, *tensors, 0.125)
    x = tensors[which]
    for wrong in (x.numpy(), None, x.int(), x.double(), x.to("meta"), x[0], x.to_sparse(), x[:, :1]):
        changed = [*tensors[:which], wrong, *tensors[which + 1 :]]
        with pytest.raises(InputError):
            prefill(0, *changed, 0.125)


needs_native = pytest.mark.skipif(
    native.library() is None, reason="the native kernels were not built: the installation found no compiler"
)


def attend_arguments() -> dict:
    q, k, v = qkv(4, 2, 3, 10, 8)
    indices, indptr = torch.arange(2, dtype=torch.int32).repeat(12), 2 * torch.arange(13)
    return {
        "q": q, "k": k, "v": v, "kv_head": torch.tensor([0, 0, 1, 1]), "positions": torch.arange(7, 10), "indices": indices,
        "indptr": indptr, "query_block": 1, "scale": 0.3,
    }  # fmt: skip


def select_arguments() -> dict:
    lists = Rule().lists(torch.full((4,), 0.5, dtype=torch.float64), torch.arange(7, 10))
    return {"scores": torch.randn(4, 3, 10), "candidates": lists.candidates, "tail": lists.tail, "indptr": lists.indptr} | {
        "indices": torch.empty(lists.size, dtype=torch.int32), "sinks": 0, "recent": 0, "self_first": False,
    }  # fmt: skip


def estimate_arguments() -> dict:
    q, _, _ = qkv(4, 2, 3, 10, 8)
    return {
        "q": q, "q_scales": torch.full((4,), 0.1), "packed": torch.zeros(2, 2, 2, 16, 4, dtype=torch.uint8), "keys": 10,
        "kv_head": torch.tensor([0, 0, 1, 1]), "visible": torch.arange(8, 11), "pooling": "rows", "query_block": 1,
    }  # fmt: skip


def pack_arguments() -> dict:
    k = qkv(4, 2, 3, 10, 8)[1]
    packed, by_key = torch.zeros(2, 2, 2, 16, 4, dtype=torch.uint8), torch.zeros(2, 32, 8, dtype=torch.uint8)
    return {"k": k, "scales": torch.full((2,), 0.1), "packed": packed, "first_key": 0, "by_key": by_key}


def unite_arguments() -> dict:
    given = attend_arguments()
    return {"row_indices": given["indices"], "row_indptr": given["indptr"], "rows": 3, "tile_rows": 2}


def attend_tiles_arguments() -> dict:
    given = attend_arguments() | {"members": torch.full((24,), 3), "tile_rows": 2, "starts": 3 * torch.arange(8)}
    del given["indptr"], given["query_block"]
    return given | {"ends": given["starts"] + 2}


def other_vectors(x: torch.Tensor) -> list[torch.Tensor]:
    """Of another dtype, length, place in memory, layout, order or range."""
    wrong = [x.float() if not x.is_floating_point() else x.long(), x.short(), x[:-1], x[None], x.to_sparse()]
    wrong += [x.repeat(2)[::2], -x - 1, x + 1000] if not x.is_floating_point() else [x.repeat(2)[::2], -x, x * NAN]
    return wrong


NATIVE = [
    ("attend", attend_arguments, ("kv_head", "positions", "indices", "indptr"), ("q", "k", "v"), ("query_block",)),
    ("select", select_arguments, ("candidates", "tail", "indptr"), ("scores",), ("sinks", "recent")),
    ("estimate", estimate_arguments, ("q_scales", "kv_head", "visible"), ("q", "packed"), ("keys", "query_block")),
    ("pack", pack_arguments, ("scales",), ("k", "packed", "by_key"), ("first_key",)),
    ("unite", unite_arguments, ("row_indptr",), (), ("rows", "tile_rows")),
    (
        "attend_tiles",
        attend_tiles_arguments,
        ("kv_head", "positions", "indices", "starts", "ends"),
        ("q", "k", "v"),
        ("tile_rows",),
    ),
]


@needs_native
@pytest.mark.parametrize(("name", "make", "vectors", "tensors", "sizes"), NATIVE, ids=[case[0] for case in NATIVE])
def test_operators_refuse_what_native_code_would_misread(name, make, vectors, tensors, sizes):
    operator, given = getattr(ops, name), make()
    operator(**given)
    changes = [{part: wrong} for part in vectors for wrong in other_vectors(given[part])]
    for part in tensors:
        x = given[part]
        changes += [{part: wrong} for wrong in (x.double(), x.int(), x[0], x[:, :, :1], x[:1].to_sparse())]
    changes += [{part: wrong} for part in sizes for wrong in (-1, 10**12)]
    for change in changes:
        with pytest.raises((InputError, NotImplementedError)):
            operator(**given | change)


@needs_native
def test_lists_go_into_no_memory_that_native_code_would_overrun():
    """Whatever is in it."""
    given = select_arguments()
    indices = given["indices"]
    longer = torch.empty(len(indices) + 1, dtype=torch.int32)
    wrong = [indices.long(), indices.float(), indices[:-1], longer, indices[None], indices.repeat(2)[::2], indices.to_sparse()]
    for one in (*wrong, indices[:0]):
        with pytest.raises((InputError, NotImplementedError)):
            ops.select(**given | {"indices": one})


@needs_native
def test_unions_refuse_keys_and_words_that_native_code_would_misread():
    """Any key from 0 on may stand in a list, and any bits in a word."""
    given, tiles = unite_arguments(), attend_tiles_arguments()
    for indices in (-given["row_indices"] - 1, given["row_indices"].long(), given["row_indices"][:-1]):
        with pytest.raises(InputError):
            ops.unite(**given | {"row_indices": indices})
    for members in (tiles["members"].int(), tiles["members"][:-1], tiles["members"].repeat(2)[::2]):
        with pytest.raises(InputError):
            ops.attend_tiles(**tiles | {"members": members})


@pytest.mark.parametrize("value", NOT_NAMES, ids=shown)
def test_kernels_and_levels_are_names(value):
    with pytest.raises(InputError, match="kernel: expected one of"):
        choose(value, head_dim=64, dtype=torch.float32)
    if native.library() is not None:
        with pytest.raises(InputError, match="level on this processor: expected one of"), native.forced_level(value):
            pass


@pytest.mark.parametrize("value", [*NOT_INTEGERS, -1, 10**30], ids=shown)
def test_estimators_refuse_what_is_no_integer(value):
    with pytest.raises(InputError, match=r"^seed: expected an integer"):
        Random(value)
    with pytest.raises(InputError, match=r"^sinks: expected an integer"):
        Streaming(value)
    with pytest.raises(InputError, match=r"^seed: expected an integer"):
        shadowattn.check_estimator(Oracle(), seed=value)


def test_scales_of_queries_alone_and_those_beside_a_grid_are_refused_when_the_estimator_is_made():
    q, k, grid = {"q_scales": torch.ones(4)}, {"k_scales": torch.ones(2)}, {"grid": ScaleGrid((0.1,), (0.1,))}
    for scales in (q, q | k | grid, q | grid, k | grid):
        with pytest.raises(InputError, match=r"^Int8Fused: expected scales of Q and of K, of K alone, a grid, or none of them"):
            Int8Fused(**scales)


@pytest.mark.parametrize("value", ["x", 3, Rule, {"query_block": 1}], ids=shown)
def test_a_rule_is_a_rule(value):
    with pytest.raises(InputError, match=r"^rule: expected a Rule"):
        shadowattn.check_estimator(Oracle(), rule=value)


def test_heads_of_a_tensor_stand_in_the_order_of_the_keys_that_they_read():
    with pytest.raises(InputError, match=r"ascending order, got \[0, 1, 0\]"):
        Heads.all(4, 2)[torch.tensor([0, 2, 1])]
