"""Estimators of other papers: each by a plain definition of its own, key by key, and held to the contract of all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowattn
from shadowattn.errors import InputError
from shadowattn.online.attention import SparseAttention
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.mean_keys import MeanKeys
from shadowattn.online.estimators.pages import ALWAYS
from shadowattn.online.estimators.quest import Quest
from shadowattn.online.estimators.sign1 import Sign1, hadamard
from shadowattn.types import KeyOffset
from tests.tensors import qkv

HEADS, KV_HEADS, ROWS, DIM = 4, 2, 6, 24


def chunk_of(keys: int) -> Chunk:
    q, k, _ = qkv(HEADS, KV_HEADS, ROWS, keys, DIM)
    return Chunk.of(q, k)


def each(chunk: Chunk):
    """Every head, row and visible key, with its query and key in float64."""
    for head in range(HEADS):
        for row, position in enumerate(chunk.positions.tolist()):
            for key in range(position + 1):
                yield head, row, position, key, chunk.q[head, row].double(), chunk.k[head // (HEADS // KV_HEADS)].double()


def assert_defined(estimator, chunk: Chunk, plain) -> None:
    scores = estimator.scores(chunk)
    assert list(scores.shape) == [HEADS, ROWS, chunk.keys]
    for head, row, position, key, q, k in each(chunk):
        torch.testing.assert_close(scores[head, row, key].double(), plain(q, k, position, key), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (Quest, lambda q, page: torch.maximum(q * page.amax(0), q * page.amin(0)).sum()),  # the most that a key could score
        (MeanKeys, lambda q, page: q @ page.mean(0)),
    ],
)
@given(keys=st.integers(ROWS, 40), page=st.integers(1, 9))
def test_a_key_scores_as_its_page_does_and_a_rows_own_page_is_kept(kind, plain, keys, page):
    def of_page(q, k, position, key):
        first = key // page * page
        if first == position // page * page:  # the nearest first
            return torch.tensor(ALWAYS * (1 + (key - first) / page), dtype=torch.float64)
        return plain(q, k[first : first + page])

    assert_defined(kind(page), chunk_of(keys), of_page)


def rotation(dim: int) -> torch.Tensor:
    """The same rotation by Sylvester's construction."""
    block, made = dim & -dim, torch.ones(1, 1, dtype=torch.float64)
    while len(made) < block:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)], 0)
    return torch.block_diag(*[made * block**-0.5] * (dim // block))


@pytest.mark.parametrize("dim", [1, 24, 64, 96, 128, 160])
def test_hadamard_is_sylvesters_and_orthonormal(dim):
    x, by = torch.randn(5, dim, dtype=torch.float64), rotation(dim)
    torch.testing.assert_close(hadamard(x), x @ by.T)
    torch.testing.assert_close(by @ by.T, torch.eye(dim, dtype=torch.float64))


@given(rotate=st.booleans(), scaled=st.booleans(), offset=st.booleans())
def test_sign1_is_the_query_times_signs(rotate, scaled, offset):
    vectors = torch.randn(1, KV_HEADS, DIM, generator=torch.Generator().manual_seed(1)) if offset else None
    key_offset = KeyOffset(vectors.tolist()) if offset else None
    chunk, by = chunk_of(20), rotation(DIM) if rotate else torch.eye(DIM, dtype=torch.float64)
    scores = Sign1(rotate, scaled, key_offset).scores(chunk)
    for head, row, _, key, q, k in each(chunk):
        moved = by @ (k[key] - (vectors[0, head // 2].double() if offset else 0))
        scale = moved.abs().mean() if scaled else 1.0
        torch.testing.assert_close(scores[head, row, key].double(), (by @ q) @ torch.sign(moved) * scale, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("estimator", [Quest(8), MeanKeys(8), Sign1()], ids=lambda x: type(x).__name__)
def test_the_contract_of_all_estimators_holds(estimator):
    shadowattn.check_estimator(estimator)


@pytest.mark.parametrize("estimator", [Quest(8), MeanKeys(8), Sign1(rotate=False, scaled=False)], ids=lambda x: type(x).__name__)
def test_scores_that_overflow_are_refused(estimator):
    q, k, v = qkv(HEADS, KV_HEADS, ROWS, 40, DIM)
    with pytest.raises(InputError, match="NaN or infinity"):
        SparseAttention([[0.3] * HEADS], estimator)(0, 3e38 * q[None].sign(), 3 * k[None].sign(), v[None], 1e-30)


@pytest.mark.parametrize("kind", [Quest, MeanKeys])
def test_a_budget_smaller_than_a_page_keeps_the_row_itself_and_its_nearest(kind):
    q, k, _ = qkv(1, 1, 1, 40, DIM)
    ranked = kind(16).scores(Chunk.of(q, k))[0, 0].argsort(descending=True)
    assert ranked[:8].tolist() == [39, 38, 37, 36, 35, 34, 33, 32]


@pytest.mark.parametrize("kind", [Quest, MeanKeys])
def test_pages_that_lost_keys_are_made_again(kind):
    q, k, _ = qkv(HEADS, KV_HEADS, ROWS, 40, DIM)
    chunk = Chunk.of(q, k)
    before = kind(8).scores(chunk)
    chunk.cache.crop(21)
    other = torch.cat([k[:, :21], torch.randn(KV_HEADS, 19, DIM)], 1)
    torch.testing.assert_close(kind(8).scores(Chunk.of(q, other, cache=chunk.cache)), kind(8).scores(Chunk.of(q, other)))
    assert not before.equal(kind(8).scores(Chunk.of(q, other)))
