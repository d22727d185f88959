"""Two looks: a block's candidates are the best by its mean query, a row's list the best of them by its own integers."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowattn
from shadowattn.artifacts import tuples
from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.graphs import buckets
from shadowattn.graphs.symmetric_int8 import absmax_scales, quantise
from shadowattn.kernels import native
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.models.shape import fingerprint
from shadowattn.offline import observe_first_look, observe_key_offset
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.selection import Rule
from shadowattn.types import FirstLookLosses, Heads
from tests.tensors import qkv
from tests.tiny import tiny_model

BUILT = native.library() is not None


def mean_query(rows: list[list[int]]) -> list[int]:
    """The sum with its largest magnitude at 127, halves up, in whole numbers."""
    sums = [sum(column) for column in zip(*rows, strict=True)]
    largest = max(1, *(abs(x) for x in sums))
    return [(2 * 127 * x + largest) // (2 * largest) for x in sums]


def best(scores: list[int], among: list[int], count: int) -> list[int]:
    return sorted(sorted(among, key=lambda key: (-scores[key], key))[:count])


def defined(chunk: Chunk, rule: Rule, candidates: float, block_rows: int) -> list[int]:
    """The lists one after another, key by key."""
    q8, k8 = quantise(chunk.q, absmax_scales(chunk.q)).tolist(), quantise(chunk.k, absmax_scales(chunk.k)).tolist()
    ends = rule.lists(chunk.retention, chunk.positions).indptr.diff().view(len(q8), -1).tolist()
    at, found = chunk.positions.tolist(), []
    for head, group in enumerate(chunk.heads.kv.tolist()):
        keys = k8[group]

        def products(row: list[int], keys: list[list[int]] = keys) -> list[int]:
            return [sum(x * y for x, y in zip(row, key, strict=True)) for key in keys]

        for first in range(0, len(at), block_rows):
            rows = range(first, min(first + block_rows, len(at)))
            seen = at[first] + 1
            through = min(seen, math.ceil(candidates * ends[head][rows[-1]]))
            mean = products(mean_query([q8[head][row] for row in rows]))
            members = set(best(mean, list(range(seen)), through))
            members |= set(range(min(rule.sinks, len(keys)))) | set(range(max(0, seen - max(block_rows, rule.recent)), len(keys)))
            for row in rows:
                count, visible = ends[head][row], at[row] + 1
                sinks = min(rule.sinks, max(0, count - (rule.recent > 0)))
                recent = min(rule.recent, count - sinks)
                forced = {*range(sinks), *range(visible - recent, visible)}
                others = [key for key in members if key < visible and key not in forced]
                found += sorted({*forced, *best(products(q8[head][row]), others, count - len(forced))})
    return found


@given(
    rows=st.sampled_from([1, 5, 8, 9, 20]),
    before=st.sampled_from([0, 1, 40, 90]),
    retention=st.sampled_from([0.02, 0.1, 0.4, 1.0]),
    rule=st.builds(
        Rule, sinks=st.sampled_from([0, 2, 30]), recent=st.sampled_from([0, 3, 30]), min_budget=st.sampled_from([1, 1, 16])
    ),
    candidates=st.sampled_from([1.0, 1.5, 3.0]),
    block_rows=st.sampled_from([8, 16]),
    heads_at_once=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 99),
)
def test_a_row_keeps_the_best_of_what_its_block_lets_through(
    rows, before, retention, rule, candidates, block_rows, heads_at_once, seed
):
    q, k, v = qkv(4, 2, rows, rows + before, 16, seed=seed)
    chunk, estimator = Chunk.of(q, k, v, retention=retention), Hierarchical(candidates=candidates, block_rows=block_rows)
    lists, expected = rule.lists(chunk.retention, chunk.positions), defined(chunk, rule, candidates, block_rows)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(buckets, "SCORE_BYTES", 4 * rows * (rows + before) * heads_at_once)
        assert estimator.select(chunk, rule, lists, TorchKernels()).indices.tolist() == expected
        if BUILT:
            assert estimator.select(chunk, rule, lists, NativeKernels()).indices.tolist() == expected
    if BUILT:
        assert estimator.attend(chunk, rule, lambda: lists, listed=True)[1].indices.tolist() == expected


@given(
    rows=st.sampled_from([1, 9, 20]),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.75, 1.0]),
    losses=st.lists(st.sampled_from([0.0, 0.125, 0.5, 1.0]), min_size=8, max_size=8),
    layer=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_the_heads_that_lose_most_choose_from_all_keys(rows, share, losses, layer, seed):
    order = sorted(range(8), key=lambda head: (-losses[head], head))
    spared = {head - 4 * layer for head in order[: math.ceil(share * 8)]}
    q, k, v = qkv(4, 2, rows, rows + 90, 16, seed=seed)
    chunk, rule, first = Chunk.of(q, k, v, retention=0.1, layer=layer), Rule(), FirstLookLosses([losses[:4], losses[4:]], 2.0, 8)
    lists = rule.lists(chunk.retention, chunk.positions)
    looked, flat, found = (
        estimator.select(chunk, rule, lists, TorchKernels()).indices.split(lists.indptr.diff().tolist())
        for estimator in (
            Hierarchical(block_rows=8),
            Int8Fused(),
            Hierarchical(block_rows=8, flat_share=share, first_look=first),
        )
    )
    for head in range(4):
        for row in range(head * rows, (head + 1) * rows):
            assert found[row].equal((flat if head in spared else looked)[row])


def test_a_share_of_the_heads_is_rounded_up_to_whole_ones_and_no_further():
    losses = FirstLookLosses([[float(head)] * 10 for head in range(3)], 2.0, 8)
    spared = torch.stack([losses.spared(layer, Heads.all(10, 5), 0.1) for layer in range(3)])
    assert spared.sum() == 3  # 0.1 · 3 · 10 in floats is above 3
    assert spared[2, :3].all()


def test_what_a_first_look_loses_is_the_attention_mass_that_lists_have_less():
    model = tiny_model(head_dim=8)
    windows = torch.randint(3, 60, (2, 48), generator=torch.Generator().manual_seed(1))
    offset = observe_key_offset(model, windows, how="mean", chunk_tokens=24)
    how = {"chunk_tokens": 24, "candidates": 1.0, "block_rows": 8, "retention": 0.2, "key_offset": offset}
    measured = observe_first_look(model, windows, **how)
    masses = torch.zeros(2, *torch.tensor(measured.lost).shape, dtype=torch.float64)

    def keep(chunk):
        chunk = replace(chunk, retention=torch.full((len(chunk.heads),), 0.2, dtype=torch.float64))
        lists, group = Rule().lists(chunk.retention, chunk.positions), chunk.heads.kv.tolist()
        lengths = lists.indptr.diff().tolist()
        options = {"key_offset": offset}
        for at, estimator in enumerate((Int8Fused(**options), Hierarchical(candidates=1.0, block_rows=8, **options))):
            chosen = estimator.select(chunk, Rule(), lists, TorchKernels()).indices.split(lengths)
            for head in range(len(group)):
                for row, position in enumerate(chunk.positions.tolist()):
                    seen = chunk.k[group[head], : position + 1]
                    weights = torch.softmax((seen @ chunk.q[head, row]).double() * chunk.scale, 0)
                    masses[at, chunk.layer, head] += weights[chosen[head * len(chunk.positions) + row].long()].sum() / 96

    observe_prefill(model, windows, keep, chunk_tokens=24)
    torch.testing.assert_close(torch.tensor(measured.lost, dtype=torch.float64), masses[0] - masses[1], atol=1e-6, rtol=0)
    assert masses[0].gt(masses[1]).any()
    assert measured.fingerprint == fingerprint(model)
    assert FirstLookLosses(**tuples(asdict(measured))) == measured
    other = tiny_model(head_dim=8, family="llama")
    with pytest.raises(InputError, match="Hierarchical was calibrated on another model"):
        shadowattn.attach(other, 0.5, estimator=Hierarchical(candidates=1.0, block_rows=8, first_look=measured)).__enter__()


def test_what_is_no_table_of_losses_is_refused():
    with pytest.raises(InputError, match=r"first_look: expected lost \[L\]\[H\], got \[2\]"):
        FirstLookLosses([0.1, 0.2], 2.0, 64)
    with pytest.raises(InputError, match="first_look: expected finite values, got NaN or infinity"):
        FirstLookLosses([[math.nan]], 2.0, 64)
    with pytest.raises(InputError, match="first_look: expected a table of numbers"):
        FirstLookLosses([[0.1], [0.1, 0.2]], 2.0, 64)
    with pytest.raises(InputError, match=r"flat_share: expected first_look beside 0\.1, which says whom it spares"):
        Hierarchical(flat_share=0.1)
    with pytest.raises(InputError, match="expected losses by candidates=2 and block_rows=64, got those by 3 and 64"):
        Hierarchical(first_look=FirstLookLosses([[0.1]], 3.0, 64))
    with pytest.raises(InputError, match="first_look: expected a"):
        Hierarchical(first_look=[[0.1]])
    with pytest.raises(InputError, match="it is of 1 layers × 2 heads, got layer 0 and heads up to 3; measure it on this model"):
        FirstLookLosses([[0.1, 0.2]], 2.0, 64).spared(0, Heads.all(4, 2), 0.5)


def test_it_keeps_the_contract():
    shadowattn.check_estimator(Hierarchical())
    shadowattn.check_estimator(Hierarchical(first_look=FirstLookLosses([[0.0] * 64] * 4, 2.0, 64), flat_share=0.5))


def test_with_every_key_a_candidate_it_is_the_flat_estimate():
    q, k, v = qkv(4, 2, 12, 52, 16)
    twice = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=40, estimator=Hierarchical(candidates=1e6))
    once = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=40, estimator=Int8Fused())
    torch.testing.assert_close(twice, once)


def test_keys_that_come_later_and_keys_that_went_are_those_of_the_cache():
    """The bytes key by key follow the packed ones through growth and cropping."""
    q, k, v = qkv(2, 1, 40, 700, 16)
    estimator, one = Hierarchical(q_scales=torch.full((2,), 0.02), k_scales=torch.full((1,), 0.02)), None
    for keys in (40, 77, 78, 300, 700):
        chunk = Chunk.of(q, k[:, :keys], v[:, :keys], cache=None if one is None else one.cache)
        one = chunk
        held = estimator.packed(chunk, twice=True)
        packed = held.packed.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)
        assert held.by_key[:, :keys].equal(packed[:, :keys])
    held.crop(53)
    held.extend(-k[:, :90])
    assert held.by_key[:, :90].equal((quantise(torch.cat([k[:, :53], -k[:, 53:90]], 1), held.scales).short() + 128).byte())


def test_keys_are_held_twice_only_where_the_native_kernel_reads_them_so():
    """Keys that were packed for a pipeline that takes the stages apart are packed anew, then stay for all that follows."""
    q, k, v = qkv(2, 1, 40, 300, 16)
    chunk, estimator, rule = Chunk.of(q, k, v, retention=0.2), Hierarchical(), Rule()
    lists = rule.lists(chunk.retention, chunk.positions)
    alone = estimator.select(chunk, rule, lists, TorchKernels())
    assert estimator.packed(chunk).by_key is None
    if BUILT:
        assert estimator.attend(chunk, rule, lambda: lists, listed=True)[1].indices.equal(alone.indices)
        assert estimator.packed(chunk).by_key is not None
        assert estimator.repacked == 2


def test_what_it_cannot_do_is_refused():
    q, k, v = qkv(4, 2, 12, 52, 16)
    with pytest.raises(InputError, match=r"candidates: expected 1 or more times the budget, got 0\.5"):
        Hierarchical(candidates=0.5)
    with pytest.raises(InputError, match="flat_share: expected a number of 0 … 1, got 6"):
        Hierarchical(flat_share=6)
    with pytest.raises(InputError, match="block_rows: expected a multiple of 8, got 20"):
        Hierarchical(block_rows=20)
    with pytest.raises(InputError, match="block_rows: expected an integer of 8 … 64, got 128"):
        Hierarchical(block_rows=128)
    with pytest.raises(InputError, match="Hierarchical: makes lists for single rows, got query_block=4"):
        shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=40, estimator=Hierarchical(), query_block=4)
