"""Two looks: a block's candidates are the best by its mean query, a row's list the best of them by its own integers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowattn
from shadowattn.errors import InputError
from shadowattn.graphs.symmetric_int8 import absmax_scales, quantise
from shadowattn.kernels import native
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.selection import Rule
from tests.tensors import qkv

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
    rule=st.builds(Rule, sinks=st.sampled_from([0, 2, 30]), recent=st.sampled_from([0, 3, 30])),
    candidates=st.sampled_from([1.0, 1.5, 3.0]),
    block_rows=st.sampled_from([8, 16]),
    seed=st.integers(0, 99),
)
def test_a_row_keeps_the_best_of_what_its_block_lets_through(rows, before, retention, rule, candidates, block_rows, seed):
    q, k, v = qkv(4, 2, rows, rows + before, 16, seed=seed)
    chunk, estimator = Chunk.of(q, k, v, retention=retention), Hierarchical(candidates=candidates, block_rows=block_rows)
    lists, expected = rule.lists(chunk.retention, chunk.positions), defined(chunk, rule, candidates, block_rows)
    assert estimator.select(chunk, rule, lists, TorchKernels()).indices.tolist() == expected
    if BUILT:
        assert estimator.select(chunk, rule, lists, NativeKernels()).indices.tolist() == expected
        assert estimator.attend(chunk, rule, lists, listed=True)[1].indices.tolist() == expected


def test_it_keeps_the_contract():
    shadowattn.check_estimator(Hierarchical())


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
        held = estimator.packed(chunk)
        packed = held.packed.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)
        assert held.by_key[:, :keys].equal(packed[:, :keys])
    held.crop(53)
    held.extend(-k[:, :90])
    assert held.by_key[:, :90].equal((quantise(torch.cat([k[:, :53], -k[:, 53:90]], 1), held.scales).short() + 128).byte())


def test_what_it_cannot_do_is_refused():
    q, k, v = qkv(4, 2, 12, 52, 16)
    with pytest.raises(InputError, match=r"candidates: expected 1 or more times the budget, got 0\.5"):
        Hierarchical(candidates=0.5)
    with pytest.raises(InputError, match="block_rows: expected a multiple of 8, got 20"):
        Hierarchical(block_rows=20)
    with pytest.raises(InputError, match="block_rows: expected an integer of 8 … 64, got 128"):
        Hierarchical(block_rows=128)
    with pytest.raises(InputError, match="Hierarchical: makes lists for single rows, got query_block=4"):
        shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=40, estimator=Hierarchical(), query_block=4)
