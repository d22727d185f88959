"""Methods that rank for blocks of rows: each by a plain definition of its own, row by row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shadowattn
from shadowattn.errors import InputError
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.flexprefill import FlexPrefill
from shadowattn.online.estimators.pages import ALWAYS
from shadowattn.online.estimators.spargeattn import SpargeAttn, likeness
from shadowattn.online.estimators.vertical_slash import VerticalSlash
from shadowattn.online.estimators.xattention import XAttention
from tests.tensors import qkv

HEADS, KV_HEADS, DIM = 4, 2, 8


def chunk_of(rows: int, keys: int) -> Chunk:
    q, k, _ = qkv(HEADS, KV_HEADS, rows, keys, DIM)
    return Chunk.of(2 * q, 2 * k)


def attention(chunk: Chunk, head: int, row: int) -> torch.Tensor:
    """The exact probabilities of a row, float64 [K], 0 for keys after it."""
    seen = int(chunk.positions[row]) + 1
    logits = chunk.k[head * KV_HEADS // HEADS, :seen].double() @ chunk.q[head, row].double() * chunk.scale
    return torch.nn.functional.pad(torch.softmax(logits, 0), (0, chunk.keys - seen))


def seen_by(chunk: Chunk):
    """Every head, row, the row's position and each key that it sees."""
    for head in range(HEADS):
        for row, position in enumerate(chunk.positions.tolist()):
            for key in range(position + 1):
                yield head, row, position, key


def assert_scores(scores: torch.Tensor, chunk: Chunk, plain) -> None:
    assert list(scores.shape) == [HEADS, len(chunk.positions), chunk.keys]
    for head, row, position, key in seen_by(chunk):
        assert float(scores[head, row, key]) == pytest.approx(float(plain(head, row, position, key)), rel=2e-4, abs=1e-5)


def own_block(position: int, key: int, block: int) -> float | None:
    """What a key of the row's own block scores."""
    first = position // block * block
    return ALWAYS * (1 + (key - first) / block) if key >= first else None


@settings(max_examples=15)
@given(
    rows=st.integers(1, 9), more=st.integers(0, 12), last=st.integers(1, 12), first=st.integers(0, 4), recent=st.integers(0, 4)
)
def test_a_key_scores_its_column_or_its_diagonal(rows, more, last, first, recent):
    chunk = chunk_of(rows, rows + more)
    looked = range(max(0, rows - last), rows)

    def plain(head, row, position, key):
        distance = position - key
        if distance == 0:
            return 3 * ALWAYS
        most = math.ceil((position + 1) / 4)
        forced = max(min(first, most) - key, min(recent, most) - distance)
        if forced > 0:
            return ALWAYS * (1 + forced / max(first, recent))
        column = sum(attention(chunk, head, at)[key] for at in looked)
        there = [(at, int(chunk.positions[at]) - distance) for at in looked]
        return max(column, sum(attention(chunk, head, at)[on] for at, on in there if on >= 0))

    assert_scores(VerticalSlash(last, first, recent).scores(chunk), chunk, plain)


@settings(max_examples=15)
@given(rows=st.integers(1, 13), more=st.integers(0, 13), stride=st.integers(1, 3), squares=st.integers(1, 3))
def test_a_block_scores_what_its_antidiagonals_promise(rows, more, stride, squares):
    chunk, block = chunk_of(rows, rows + more), stride * squares
    at = {int(position): row for row, position in enumerate(chunk.positions)}

    def antidiagonal(head, line, column):
        total = 0.0
        for i in range(stride):
            row, key = at.get(line * stride + stride - 1 - i), column * stride + i
            if row is not None and key < chunk.keys:
                total += float(chunk.q[head, row].double() @ chunk.k[head * KV_HEADS // HEADS, key].double())
        return total * chunk.scale / stride

    def of_block(head, rows_block, keys_block):
        total = 0.0
        for line in range(rows_block * squares, (rows_block + 1) * squares):
            if any(line * stride + i in at for i in range(stride)):
                logits = [antidiagonal(head, line, column) for column in range(min(line + 1, math.ceil(chunk.keys / stride)))]
                share = torch.softmax(torch.tensor(logits, dtype=torch.float64), 0)
                total += float(share[keys_block * squares : (keys_block + 1) * squares].sum())
        return total

    known = {}

    def plain(head, row, position, key):
        if (own := own_block(position, key, block)) is not None:
            return own
        place = (head, position // block, key // block)
        return known.setdefault(place, of_block(*place)) if place not in known else known[place]

    assert_scores(XAttention(stride, block).scores(chunk), chunk, plain)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 9),
    more=st.integers(0, 12),
    query_block=st.integers(1, 5),
    key_block=st.integers(1, 5),
    likeness=st.sampled_from([-0.1, 0.3, 0.6]),
)
def test_spargeattn_ranks_means_and_keeps_what_is_unlike(rows, more, query_block, key_block, likeness):
    chunk = chunk_of(rows, rows + more)

    def plain(head, row, position, key):
        if (own := own_block(position, key, key_block)) is not None:
            return own
        every = chunk.k[head * KV_HEADS // HEADS].double()
        keys = every[key // key_block * key_block :][:key_block]
        centred = keys - every.mean(0)
        cosines = torch.nn.functional.cosine_similarity(centred[:, None], centred[None], dim=-1)
        if cosines.mean() < likeness:
            return ALWAYS
        together = [at for at, other in enumerate(chunk.positions.tolist()) if other // query_block == position // query_block]
        return chunk.q[head, together].double().mean(0) @ keys.mean(0)

    assert_scores(SpargeAttn(query_block, key_block, likeness).scores(chunk), chunk, plain)


@settings(max_examples=15)
@given(rows=st.integers(1, 9), more=st.integers(0, 12), block=st.integers(1, 5), limit=st.sampled_from([0.0, 0.1, 0.3, 1.0]))
def test_flexprefill_ranks_by_blocks_where_means_predict_the_last_rows(rows, more, block, limit):
    chunk = chunk_of(rows, rows + more)
    estimator, blocks = FlexPrefill(block, limit), math.ceil((rows + more) / block)
    columns = VerticalSlash(block).scores(chunk)
    looked = range(max(0, rows - block), rows)
    for head in range(HEADS):
        keys = chunk.k[head * KV_HEADS // HEADS].double()
        means = torch.stack([keys[i * block : (i + 1) * block].mean(0) for i in range(blocks)])
        pooled = torch.softmax(means @ chunk.q[head, list(looked)].double().mean(0) * chunk.scale, 0)
        mean = sum(attention(chunk, head, at) for at in looked) / len(looked)
        truth = torch.stack([mean[i * block : (i + 1) * block].sum() for i in range(blocks)])
        middle = (pooled + truth) / 2
        divergence = sum((x * (x / middle).log()).sum() for x in (pooled, truth)) / 2
        got = estimator.scores(chunk)[head]
        if abs(float(divergence.clamp(min=0).sqrt()) - limit) < 1e-3:
            continue  # rounding decides
        if divergence.clamp(min=0).sqrt() >= limit:
            torch.testing.assert_close(got, columns[head])  # products of fewer heads may round otherwise
            continue
        for row, position in enumerate(chunk.positions.tolist()):
            together = [at for at, other in enumerate(chunk.positions.tolist()) if other // block == position // block]
            query = chunk.q[head, together].double().mean(0)
            for key in range(position + 1):
                expected = own_block(position, key, block)
                expected = float(query @ means[key // block]) if expected is None else expected
                assert float(got[row, key]) == pytest.approx(expected, rel=2e-4, abs=1e-4)


def test_flexprefill_decides_where_probabilities_round_to_zero():
    """Keys of one block attract everything: all other blocks have no attention, and none is predicted."""
    q, k = torch.ones(1, 4, DIM), torch.full((1, 12, DIM), -100.0)
    k[:, 4:8] = 100.0
    chunk = Chunk.of(q, k)
    estimator = FlexPrefill(4)
    assert estimator.divergence(chunk, k.unflatten(1, (3, 4)).mean(2)).tolist() == [0]
    scores = estimator.scores(chunk)
    assert float(scores[0, -1, 5]) == pytest.approx(100 * DIM)
    assert estimator.counts()["block_heads"] == 1


@pytest.mark.parametrize("limit", [-1, 5])
def test_flexprefill_refuses_a_limit_that_no_divergence_can_meet(limit):
    with pytest.raises(InputError, match=r"limit: expected a number of 0 … 1"):
        FlexPrefill(limit=limit)


@pytest.mark.parametrize("gap", [100.0, 103.5, 110.0])
def test_flexprefills_divergence_is_finite_where_a_block_has_the_least_of_probabilities(gap):
    """At 103.5 a probability is the least float32 above zero, and half of it none."""
    k = torch.zeros(1, 12, DIM)
    k[:, 4:8, 0] = gap * DIM**0.5
    q = torch.zeros(1, 4, DIM)
    q[..., 0] = 1.0
    chunk = Chunk.of(q, k)
    divergence = FlexPrefill(4).divergence(chunk, k.unflatten(1, (3, 4)).mean(2))
    assert divergence.tolist() == pytest.approx([0], abs=1e-6)


def test_flexprefill_counts_the_heads_that_it_ranks_by_blocks():
    """Blocks of like keys predict the last rows of one head; keys of one block that point both ways those of no other."""
    q, k = torch.zeros(2, 4, DIM), torch.zeros(2, 12, DIM)
    q[..., 0] = 1.0
    k[0, 4:8, 0], k[1, 4:8:2, 0], k[1, 5:8:2, 0] = 10.0, 40.0, -40.0
    estimator = FlexPrefill(4)
    estimator.scores(Chunk.of(q, k))
    assert estimator.counts()["block_heads"] == 0.5


def test_half_of_a_small_budget_goes_by_the_last_rows():
    """Of 8 keys a row keeps its own, two at either end at most, and those that the last rows attend to."""
    q, k = torch.ones(1, 100, DIM), torch.zeros(1, 100, DIM)
    k[:, 40:44] = 10.0
    scores = VerticalSlash().scores(Chunk.of(q, k, retention=0.08))
    assert sorted(scores[0, -1].topk(8).indices.tolist()) == [0, 1, 40, 41, 42, 43, 98, 99]


def test_a_vector_that_all_keys_share_makes_no_block_alike():
    """As in the authors' kernel, which takes the mean key off before the cosines."""
    noise = torch.randn(1, 64, DIM, generator=torch.Generator().manual_seed(0))
    assert likeness(noise + 100.0, 16).max() < 0.4
    torch.testing.assert_close(likeness(noise + 100.0, 16), likeness(noise, 16), atol=1e-3, rtol=0)


KINDS = [VerticalSlash(8, 2, 3), XAttention(2, 8), SpargeAttn(8, 4, 0.2), FlexPrefill(4, 0.3)]


@pytest.mark.parametrize("estimator", KINDS, ids=lambda x: type(x).__name__)
def test_the_contract_holds_and_that_they_look_ahead_is_said(estimator):
    shadowattn.check_estimator(estimator)
    assert estimator.sees == "chunk"
    forgetful = type("Forgetful", (type(estimator),), {"sees": "row"})
    with pytest.raises(InputError, match=r"not causal.*sees = 'chunk'"):
        shadowattn.check_estimator(_copied(estimator, forgetful))


def _copied(estimator, kind):
    made = object.__new__(kind)
    vars(made).update(vars(estimator))
    return made


@pytest.mark.parametrize("estimator", KINDS, ids=lambda x: type(x).__name__)
def test_a_decode_step_and_shared_lists_work(estimator):
    q, k, v = qkv(HEADS, KV_HEADS, 24, 60, DIM)
    for rule in ({}, {"query_block": 4}, {"query_block": 4, "block_score": "max"}):
        out = shadowattn.sparse_attention(q, k, v, 0.3, causal_offset=36, estimator=estimator, **rule)
        assert bool(out.isfinite().all())
    one = shadowattn.sparse_attention(q[:, :1], k, v, 0.3, causal_offset=59, estimator=estimator)
    assert list(one.shape) == [HEADS, 1, DIM]


def test_blocks_that_do_not_hold_whole_squares_are_refused():
    with pytest.raises(InputError, match="block: expected a multiple of stride=8, got 100"):
        XAttention(8, 100)
