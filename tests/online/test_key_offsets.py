"""A key offset changes no row's ranking but by rounding, in every form the same, and INT8 ranks better with one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import shadowattn
from shadowattn.errors import InputError
from shadowattn.evaluation.recall import measure_recall
from shadowattn.graphs import GraphBank, GraphForm, GraphShape, symmetric_int8
from shadowattn.graphs.estimation import INPUTS
from shadowattn.graphs.symmetric_int8 import absmax_scales, shifted
from shadowattn.kernels import choose, native
from shadowattn.offline import observe_key_offset, observe_scales, scale_grid
from shadowattn.offline.requantisation import observe_products
from shadowattn.online.cache import LayerCache
from shadowattn.online.chunk import Chunk, largest_key_scales
from shadowattn.online.estimators.int8_device import Int8Device
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.quantised import Quantised
from shadowattn.online.selection import Rule
from shadowattn.reference import select
from shadowattn.types import KeyOffset, Requant, ScaleGrid
from tests.offline.test_key_offsets import biased_model, windows
from tests.profiles import key_offset, profile_for
from tests.selections import as_mask
from tests.tensors import integer_qkv, qkv
from tests.tiny import tiny_model

needs_native = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")
KERNELS = choose("torch", head_dim=64, dtype=torch.float32)
UNIT = GraphForm("unit")
OFFSET = key_offset(2, 2, 64, size=2.0)
GRID = ScaleGrid((0.01, 0.02, 0.04), (0.02, 0.04, 0.08), key_offset=OFFSET)


def bank(form=UNIT, *, grid=GRID, fold=2, top_k=0) -> GraphBank:
    shapes = tuple(GraphShape(count, 32, 64, 96, count if fold > 1 else 1, top_k) for count in (1, 2))
    return GraphBank.build(profile_for(tiny_model(), 1.0, grid=grid), shapes, form=form)


def chunk_of(q, k, **options) -> Chunk:
    return Chunk.of(q, k, layer=1, **options)


def moved_qkv(rows=32, keys=90, *, seed=0, dtype=torch.float32):
    """Keys around the offset of layer 1, heads of several ranges."""
    q, k, v = qkv(4, 2, rows, keys, 64, seed=seed)
    q, k = q * torch.tensor([1.0, 0.4, 0.2, 0.7])[:, None, None], k + OFFSET.of(1)[:, None]
    return q.to(dtype), k.to(dtype), v.to(dtype)


# What it must not change


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    block=st.sampled_from([(1, "max"), (8, "leading_query"), (8, "sum"), (8, "pooled_query")]),
    retention=st.sampled_from([0.05, 0.2, 0.5]),
    sinks=st.integers(0, 3),
    recent=st.integers(0, 3),
)
def test_where_integers_are_exact_no_list_changes(seed, block, retention, sinks, recent):
    """Keys, queries and offset of small whole numbers, and a step of one: nothing is rounded (but the mean query, alike)."""
    q, k, _ = integer_qkv(4, 2, 24, 60, 64, seed=seed)
    offset = KeyOffset(torch.randint(-9, 10, (1, 2, 64), generator=torch.Generator().manual_seed(seed)).tolist())
    rule = Rule(*block, sinks, recent)
    ones = {"q_scales": torch.ones(4), "k_scales": torch.ones(2)}
    chosen = []
    for one in (Int8Tensor(**ones), *(kind(**ones, key_offset=offset) for kind in (Int8Tensor, Int8Fused))):
        chunk = Chunk.of(q, k, retention=retention)
        chosen.append(one.select(chunk, rule, rule.lists(chunk.retention, chunk.positions), KERNELS).indices)
    assert chosen[1].equal(chosen[0])
    assert chosen[2].equal(chosen[0])


@given(seed=st.integers(0, 1000), score=st.sampled_from(["leading_query", "sum", "pooled_query", "probability"]))
def test_the_definition_of_a_shared_list_does_not_depend_on_a_rows_constant(seed, score):
    q, k, _ = integer_qkv(2, 2, 16, 40, 8, seed=seed)
    offset = torch.randint(-9, 10, (2, 1, 8), generator=torch.Generator().manual_seed(seed)).float()
    kept = [
        select(q @ keys.mT, torch.full((2,), 0.2, dtype=torch.float64), 25 + torch.arange(16), 8, score)
        for keys in (k, k - offset)
    ]
    assert kept[0].equal(kept[1])


def test_the_largest_score_over_rows_does():
    """Two rows, two keys before them: without the offset the second row's scores are the larger, with it the first's."""
    q, k = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[3.0, 8.0], [1.0, 9.0], [0.0, 0.0], [0.0, 0.0]]])
    how = torch.full((1,), 0.3, dtype=torch.float64), torch.tensor([3, 4]), 2, "max"
    kept = [select(q @ (k - offset).mT, *how)[0, 0, :2].tolist() for offset in (torch.zeros(2), torch.tensor([0.0, 20.0]))]
    assert kept == [[False, True], [True, False]]


@needs_native
def test_without_one_and_with_zeros_the_integers_are_the_same():
    q, k, _ = qkv(4, 2, 32, 90, 64)
    plain = replace(GRID, key_offset=None)
    zeros = replace(GRID, key_offset=KeyOffset(torch.zeros(2, 2, 64).tolist()))
    made = {
        grid: [kind.scores(chunk_of(q, k)) for kind in (Int8Graph(bank(grid=grid)), Int8Fused(grid), Quantised(grid))]
        for grid in (plain, zeros)
    }
    for one, other in zip(made[plain], made[zeros], strict=True):
        assert one.equal(other)
    for kind in (Int8Fused, Int8Tensor, Quantised):
        assert kind().scores(chunk_of(q, k)).equal(kind(key_offset=zeros.key_offset).scores(chunk_of(q, k)))


# The same in every form


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fold", [1, 2])
def test_every_form_makes_the_same_integers(fold, dtype):
    q, k, _ = moved_qkv(dtype=dtype)
    scores = {
        "graphs": Int8Graph(bank(fold=fold)).scores(chunk_of(q, k)),
        "native": Int8Fused(GRID).scores(chunk_of(q, k)),
        "torch": Quantised(GRID).scores(chunk_of(q, k)),
    }
    left = shifted(k, OFFSET, 1).repeat_interleave(2, 0)
    assert scores["graphs"].equal(scores["torch"])
    assert scores["native"].equal(scores["torch"])
    exact = q.float() @ left.mT
    units = Int8Fused(GRID).units(chunk_of(q, k))
    assert ((scores["torch"] * units[:, None, None] - exact).abs().amax((1, 2)) < 0.1 * exact.abs().amax((1, 2))).all()
    assert Int8Graph(bank(fold=fold)).units(chunk_of(q, k)).equal(units)
    assert Quantised(GRID).units(chunk_of(q, k)).equal(units)


@needs_native
def test_scales_of_the_tensors_make_the_same_integers_too():
    q, k, _ = moved_qkv()
    expected = Int8Tensor.of(q, k, key_offset=OFFSET, layer=1).scores(chunk_of(q, k))
    for one in (Int8Tensor(key_offset=OFFSET), Quantised(key_offset=OFFSET), Int8Fused(key_offset=OFFSET)):
        assert one.scores(chunk_of(q, k)).equal(expected)
    assert Int8Fused.of(q, k, key_offset=OFFSET, layer=1).scores(chunk_of(q, k)).equal(expected)
    assert not Int8Tensor().scores(chunk_of(q, k)).equal(expected)


@pytest.mark.parametrize("inputs", INPUTS)
def test_scores_of_the_graphs_are_those_of_the_keys_less_it(inputs):
    q, k, _ = moved_qkv()
    form = GraphForm(inputs)
    scores = Int8Graph(bank(form)).scores(chunk_of(q, k))
    expected = Int8Graph(bank(form, grid=replace(GRID, key_offset=None))).scores(chunk_of(q, shifted(k, OFFSET, 1)))
    assert scores.equal(expected)


@pytest.mark.parametrize("requant", [None, Requant("target_requant", 2e-3), Requant("fixed_output", 0.5)])
@pytest.mark.parametrize("query_block", [1, 8])
def test_graphs_that_select_take_the_keys_less_it(query_block, requant):
    q, k, _ = moved_qkv()
    form = GraphForm("unit", requant, mask=True, pool=(query_block, 1), indices=True)
    rule, retention = Rule(query_block, "max"), torch.full((4,), 0.2, dtype=torch.float64)
    chunk = chunk_of(q, k, retention=0.2)
    selection = Int8Device(bank(form, top_k=96)).select(chunk, rule, rule.lists(retention, chunk.positions), KERNELS)
    scores = Quantised(GRID, requant=requant).scores(chunk_of(q, k))
    expected = select(scores, retention, chunk.positions + 1, query_block, "max" if query_block > 1 else "leading_query")
    assert as_mask(selection, k.shape[1]).equal(expected)


@needs_native
@pytest.mark.parametrize("make", [lambda grid: Int8Graph(bank(grid=grid)), Int8Fused, Quantised])
def test_estimators_with_an_offset_keep_the_contract(make):
    """One bucket: which one serves a chunk may depend on later tokens."""
    shadowattn.check_estimator(make(ScaleGrid((0.02,), (0.04,), key_offset=OFFSET)), layer=1)


# What it is for


def share_found(exact: torch.Tensor, scores: torch.Tensor, retention: float = 0.2) -> float:
    """Share of each row's best keys [H, Q, K] that the other scores rank among their best."""
    keep = int(retention * exact.shape[2])
    best, found = (torch.zeros_like(x).scatter_(2, x.topk(keep, 2).indices, 1.0) for x in (exact.float(), scores.float()))
    return float((best * found).sum() / best.sum())


def test_recall_rises_where_keys_share_a_large_vector():
    q, k, _ = qkv(4, 2, 32, 400, 64)
    common = torch.zeros(2, 64)
    common[:, ::16] = torch.tensor([30.0, -40.0, 50.0, 25.0])
    k = 0.3 * k + common[:, None]
    exact = q @ k.repeat_interleave(2, 0).mT
    offset = KeyOffset([common.tolist()])
    for bits, least in ((8, 0.1), (4, 0.3)):
        plain, less = (share_found(exact, Quantised(bits=bits, key_offset=one).scores(Chunk.of(q, k))) for one in (None, offset))
        assert less > plain + least
        assert less > {8: 0.97, 4: 0.8}[bits]
    found = {}
    for one in (None, offset):
        grid = ScaleGrid(*((float(absmax_scales(x).max()),) for x in (q, shifted(k, one, 0))), key_offset=one)
        peak = float(Quantised(grid).scores(Chunk.of(q, k)).abs().max())
        found[one] = share_found(exact, Quantised(grid, requant=Requant("target_requant", 127 / peak)).scores(Chunk.of(q, k)))
    assert found[offset] > 0.95
    assert found[None] < 0.8  # a row's spread is some of the 256 steps


def test_recall_of_a_model_with_biased_keys_rises():
    """The whole chain: offset, scales of what is left, outputs rounded by what is left."""
    model, ids = biased_model(30.0), windows(2)
    estimates = {}
    for how in ("none", "mean", "midrange"):
        offset = observe_key_offset(model, ids, chunk_tokens=32, how=how)
        grid = scale_grid(observe_scales(model, ids, chunk_tokens=32, key_offset=offset))
        outputs = observe_products(model, ids, grid, chunk_tokens=32)
        requant = outputs.requant("target_requant")
        estimates |= {f"{how}, float": Quantised(grid), f"{how}, int8": Quantised(grid, requant=requant)}
    found = measure_recall(model, windows(3)[2:], estimates, [0.2], chunk_tokens=32)
    recalls = {name: one.mean("row", 0) for name, one in found.items()}
    for how in ("mean", "midrange"):
        assert recalls[f"{how}, float"] > recalls["none, float"]
        assert recalls[f"{how}, int8"] > recalls["none, int8"] + 0.1


# What is kept of keys


@pytest.fixture(params=[2**24, 2000])
def parts(request, monkeypatch):
    """How many bytes of keys are copied at a time."""
    monkeypatch.setattr(symmetric_int8, "_PART_BYTES", request.param)


@pytest.mark.parametrize("length", range(0, 21, 5))
def test_the_largest_shifted_key_is_that_of_the_keys_that_are_left(length, parts):
    cache, (_, k, _) = LayerCache(), qkv(1, 2, 1, 20, 64)
    for end in (5, 12, 20):
        chunk = chunk_of(k[:, end - 1 : end], k[:, :end], cache=cache)
        largest_key_scales(chunk, OFFSET)
        largest_key_scales(chunk)  # two in one cache
    cache.crop(length)
    other = torch.cat([k[:, :length], 5 * k[:, length:].flip(1)], 1)
    chunk = chunk_of(other[:, -1:], other, cache=cache)
    assert largest_key_scales(chunk, OFFSET).equal((other - OFFSET.of(1)[:, None]).abs().amax((1, 2)) / 127)
    assert largest_key_scales(chunk).equal(other.abs().amax((1, 2)) / 127)


@needs_native
@pytest.mark.parametrize("length", [0, 1, 64, 70, 99])
def test_cropped_keys_are_packed_again_less_it(length, parts):
    _, k, _ = moved_qkv(1, 100)
    other = k.clone()
    other[:, length:] = -k[:, length:].flip(1)
    fixed = {"q_scales": torch.full((4,), 0.03), "k_scales": torch.full((2,), 0.06)}
    fused, plain = Int8Fused(**fixed, key_offset=OFFSET), Int8Fused(**fixed)
    cache, alone = LayerCache(), LayerCache()

    def packed(one, keys, cache):
        return one.packed(chunk_of(keys[[0, 0, 1, 1], -1:], keys, cache=cache)).packed[:, :6].clone()

    for keys in (k[:, :70], k):
        for one in (fused, plain):  # two in one cache
            packed(one, keys, cache)
    cache.crop(length)
    assert packed(fused, other, cache).equal(packed(fused, other, alone))
    assert packed(plain, other, cache).equal(packed(plain, other, LayerCache()))
    assert not packed(fused, other, cache).equal(packed(plain, other, cache))


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: Int8Tensor(key_offset=OFFSET), lambda: Int8Graph(bank()), lambda: Int8Fused(GRID)])
def test_a_cropped_cache_continues_as_one_without_a_history(make):
    if native.library() is None and isinstance(make(), Int8Fused):
        pytest.skip("the native kernels were not built: no C++ compiler")
    model, ids = tiny_model(), windows(1, 90)
    estimator, cache = make(), DynamicCache(config=model.config)
    profile = profile_for(model, 0.3, grid=GRID)
    with shadowattn.attach(model, profile, estimator=estimator, chunk_tokens=16):
        model(ids[:, :48], past_key_values=cache, use_cache=True)
        cache.crop(-16)
        continued = model(ids[:, 60:90], past_key_values=cache, use_cache=True).logits
    with shadowattn.attach(model, profile, estimator=make(), chunk_tokens=16):
        fresh = DynamicCache(config=model.config)
        model(ids[:, :32], past_key_values=fresh, use_cache=True)
        torch.testing.assert_close(continued, model(ids[:, 60:90], past_key_values=fresh).logits, atol=1e-5, rtol=1e-5)


# What does not fit


def test_an_offset_of_another_model_is_refused():
    q, k, _ = qkv(4, 2, 8, 40, 32)
    for one in (Int8Tensor(key_offset=OFFSET), Quantised(key_offset=OFFSET), Quantised(GRID)):
        with pytest.raises(InputError, match=r"key_offset: expected \[G, D\] = \[2, 32\] for layer 1, got \[2, 64\]"):
            one.scores(chunk_of(q, k))
    q, k, _ = qkv(4, 2, 8, 40, 64)
    with pytest.raises(InputError, match="key_offset: it has 2 layers, got layer 2"):
        Quantised(GRID).scores(Chunk.of(q, k, layer=2))


@pytest.mark.parametrize("kind", [Int8Fused, Quantised])
def test_an_offset_beside_a_grid_is_refused(kind):
    with pytest.raises(InputError, match="key_offset: expected none beside a grid"):
        kind(GRID, key_offset=OFFSET)


def test_a_grid_of_another_offset_than_the_profiles_is_refused_by_name():
    profile = profile_for(tiny_model(), 0.2, grid=replace(GRID, key_offset=None))
    with pytest.raises(InputError, match=f"no key offset where the grid has {OFFSET}"):
        Int8Fused(GRID).check_profile(profile)
    with pytest.raises(InputError, match="its grid is not that of the profile's scales; make it"):
        Int8Fused(ScaleGrid((0.5,), (0.5,))).check_profile(profile)
    Int8Fused(GRID).check_profile(profile_for(tiny_model(), 0.2, grid=GRID))
