"""Integers with a scale for every token, and SALE's of four bits: by a plain definition, key by key."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shadowattn
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.per_token import PerToken, token_integers
from shadowattn.online.estimators.quantised import Quantised
from shadowattn.online.estimators.sale import Sale
from shadowattn.types import KeyOffset, ScaleGrid
from tests.tensors import qkv

HEADS, KV_HEADS, DIM = 4, 2, 8


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A vector [D] in steps of its own largest magnitude over the largest integer, float64."""
    step = float(x.abs().max()) / (2 ** (bits - 1) - 1)
    return torch.tensor([round(float(value) / step) * step if step else 0.0 for value in x], dtype=torch.float64)


def assert_scores(scores: torch.Tensor, chunk: Chunk, plain) -> None:
    assert list(scores.shape) == [HEADS, len(chunk.positions), chunk.keys]
    for head in range(HEADS):
        k = chunk.k[head * KV_HEADS // HEADS]
        for row, position in enumerate(chunk.positions.tolist()):
            for key in range(position + 1):
                expected = float(plain(head, row, k, key))
                assert float(scores[head, row, key]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(max_examples=20)
@given(rows=st.integers(1, 6), more=st.integers(0, 8), bits=st.integers(2, 8), offset=st.booleans())
def test_a_key_scores_the_product_of_two_vectors_that_were_rounded_alone(rows, more, bits, offset):
    q, k, _ = qkv(HEADS, KV_HEADS, rows, rows + more, DIM)
    chunk, vectors = Chunk.of(q, k), torch.zeros(1, KV_HEADS, DIM)
    if offset:
        vectors = torch.randn(1, KV_HEADS, DIM, generator=torch.Generator().manual_seed(3))
    scores = PerToken(bits, KeyOffset(vectors.tolist()) if offset else None).scores(chunk)

    def plain(head, row, keys, key):
        return rounded(q[head, row], bits) @ rounded(keys[key] - vectors[0, head * KV_HEADS // HEADS], bits)

    assert_scores(scores, chunk, plain)


@settings(max_examples=20)
@given(rows=st.integers(1, 9), more=st.integers(0, 8), block=st.integers(1, 10))
def test_sale_rounds_what_is_left_of_a_row_and_a_key_beside_their_means(rows, more, block):
    q, k, _ = qkv(HEADS, KV_HEADS, rows, rows + more, DIM)
    chunk = Chunk.of(q + 1, k + 2)
    scores = Sale(block).scores(chunk)

    def plain(head, row, keys, key):
        own = [at for at, position in enumerate(chunk.positions.tolist()) if position // block == (row + more) // block]
        mean_query = sum(chunk.q[head, at].double() for at in own) / len(own)
        left = keys[key].double() - keys.double().mean(0)
        query = (chunk.q[head, row].double() - mean_query).float()
        return rounded(query, 4) @ rounded(left.float(), 4) + mean_query @ left

    assert_scores(scores, chunk, plain)


@pytest.mark.parametrize("kind", [PerToken(), PerToken(8), Sale(), Sale(3), Quantised(), Quantised(smooth=True)])
def test_they_keep_the_contract(kind):
    shadowattn.check_estimator(kind)


def test_scales_that_are_measured_on_the_chunk_are_said_to_be():
    assert Quantised().sees == Quantised(ScaleGrid((0.02,), (0.02,)), smooth=True).sees == Sale().sees == "chunk"
    assert Quantised(ScaleGrid((0.02,), (0.02,))).sees == PerToken().sees == "row"


def test_a_vector_of_zeros_stays_zeros():
    integers, scales = token_integers(torch.zeros(1, 2, 4), 4)
    assert integers.equal(torch.zeros(1, 2, 4))
    assert bool((scales > 0).all())
