"""The lightning indexer: its scores by definition, its training, and what is refused."""

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowattn
from shadowattn.artifacts import tuples
from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.models.shape import fingerprint
from shadowattn.offline import train_indexer
from shadowattn.online.estimators.lightning_indexer import LightningIndexer
from shadowattn.types import IndexerWeights
from tests.online.estimators.test_rankings import DIM, HEADS, KV_HEADS, chunk_of
from tests.tiny import tiny_model


def weights(heads: int, dims: int, *, of: tuple[int, int, int] = (HEADS, KV_HEADS, DIM), seed: int = 0) -> IndexerWeights:
    generator = torch.Generator().manual_seed(seed)
    count, groups, dim = of
    sizes = (1, heads, dims, count * dim), (1, dims, groups * dim), (1, heads, count * dim + 1)
    return IndexerWeights(*(torch.randn(*size, generator=generator).tolist() for size in sizes))


@given(heads=st.integers(1, 3), dims=st.integers(2, 8))
def test_scores_are_gated_rectified_products(heads, dims):
    indexer, chunk = weights(heads, dims), chunk_of(20)
    scores = LightningIndexer(indexer, heads, dims).scores(chunk)
    q, k, gate = (torch.tensor(x[0], dtype=torch.float64) for x in (indexer.q, indexer.k, indexer.gate))
    for row in range(chunk.q.shape[1]):
        queries = torch.cat([chunk.q[head, row] for head in range(HEADS)]).double()
        for key in range(0, chunk.keys, 3):
            made = k @ torch.cat([chunk.k[group, key] for group in range(KV_HEADS)]).double()
            made = (made - made.mean()) / (made.var(correction=0) + 1e-5).sqrt()
            of_heads = [(gate[m] @ torch.cat([queries, torch.ones(1)])) * max(0.0, q[m] @ queries @ made) for m in range(heads)]
            assert float(scores[0, row, key]) == pytest.approx(float(sum(of_heads)), rel=1e-3, abs=1e-2)


def test_some_heads_of_a_layer_get_the_layers_list():
    chunk, estimator = chunk_of(20), LightningIndexer(weights(2, 4), 2, 4)
    whole = estimator.scores(chunk)
    for which in (slice(0, 1), slice(1, 3), [0, 3]):
        assert estimator.scores(chunk[which]).equal(whole)
    for rows, part in chunk.split(8):
        torch.testing.assert_close(estimator.scores(part), whole[:, rows, : part.keys])


def test_the_contract_holds():
    shadowattn.check_estimator(LightningIndexer(weights(2, 8, of=(8, 2, 64)), 2, 8), heads=8, kv_heads=2)


def test_training_brings_its_softmax_nearer_to_what_heads_attend_to():
    model = tiny_model(head_dim=8)
    windows = torch.randint(3, 60, (2, 48), generator=torch.Generator().manual_seed(1))
    how = {"heads": 2, "dims": 8, "chunk_tokens": 24}
    begun, trained = train_indexer(model, windows, steps=1, **how), train_indexer(model, windows, **how)
    assert all(after < 0.5 * before for after, before in zip(trained.divergence, begun.divergence, strict=True))
    assert trained.fingerprint == fingerprint(model)
    assert IndexerWeights(**tuples(asdict(trained))) == trained
    assert train_indexer(model, windows, **how) == trained

    def mass(chunk, indexer):
        """What dense attention gives the eight keys of the highest scores, of the last row."""
        score = LightningIndexer(indexer, 2, 8).scores(chunk)[0, -1]
        k = chunk.k.repeat_interleave(len(chunk.q) // len(chunk.k), 0)
        shares = (chunk.q[:, -1:] @ k.mT * chunk.scale).softmax(-1).mean((0, 1))
        return float(shares[score.topk(8).indices].sum())

    found = {id(begun): [], id(trained): []}

    def observe(chunk):
        for indexer in (begun, trained):
            found[id(indexer)].append(mass(chunk, indexer))

    observe_prefill(model, windows, observe, chunk_tokens=48)
    assert sum(found[id(trained)]) > sum(found[id(begun)])


def test_an_indexer_of_another_model_is_refused():
    model, other = tiny_model(head_dim=8), tiny_model(head_dim=8, family="llama")
    indexer = train_indexer(other, torch.arange(3, 27)[None], heads=1, dims=4, chunk_tokens=24, steps=2)
    estimator = LightningIndexer(indexer, 1, 4)
    with shadowattn.attach(other, 0.5, estimator=estimator), torch.no_grad():
        other(torch.arange(3, 9)[None])
    with pytest.raises(InputError, match="LightningIndexer was calibrated on another model"):
        shadowattn.attach(model, 0.5, estimator=estimator).__enter__()
    with pytest.raises(InputError, match="train it on this model"):
        LightningIndexer(weights(1, 4), 1, 4).scores(replace(chunk_of(20), layer=1))


def test_what_does_not_fit_together_is_refused():
    good = weights(2, 4)
    with pytest.raises(InputError, match=r"indexer: expected q \[L\]"):
        replace(good, k=good.gate)
    with pytest.raises(InputError, match="got NaN or infinity"):
        replace(good, gate=torch.full((1, 2, HEADS * DIM + 1), torch.nan).tolist())
    with pytest.raises(InputError, match="expected tables of numbers"):
        replace(good, q="some")
    with pytest.raises(InputError, match="indexer: expected a"):
        LightningIndexer(None)
    with pytest.raises(InputError, match="heads: expected the 2 that the indexer was trained with, got 4"):
        LightningIndexer(good)
    with pytest.raises(InputError, match="dims"):
        train_indexer(tiny_model(head_dim=8), torch.arange(3, 27)[None], heads=1, dims=10_000, chunk_tokens=24)
