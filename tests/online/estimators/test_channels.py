"""Estimators that look at a few channels, chosen on calibration text."""

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
from shadowattn.offline import observe_channels
from shadowattn.online.estimators.double_sparsity import DoubleSparsity
from shadowattn.online.estimators.loki import Loki
from shadowattn.types import ChannelStatistics
from tests.online.estimators.test_rankings import DIM, HEADS, KV_HEADS, assert_defined, chunk_of
from tests.tiny import tiny_model


def some(layers: int = 1, dim: int = DIM, *, seed: int = 0) -> ChannelStatistics:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.rand(layers, count, dim, generator=generator) for count in (HEADS, KV_HEADS))
    axes = torch.linalg.qr(torch.randn(layers, KV_HEADS, dim, dim, generator=generator, dtype=torch.float64)).Q
    return ChannelStatistics(q.tolist(), k.tolist(), axes.tolist())


@given(kept=st.integers(1, DIM))
def test_double_sparsity_sums_the_heads_channels(kept):
    channels, chunk = some(), chunk_of(20)
    q, k = torch.tensor(channels.q[0]), torch.tensor(channels.k[0])
    scores = DoubleSparsity(channels, kept).scores(chunk)
    for head in range(HEADS):
        weight = (q[head] * k[head // 2]).tolist()
        best = sorted(range(DIM), key=lambda c: (-weight[c], c))[:kept]
        expected = chunk.q[head][:, best].double() @ chunk.k[head // 2][:, best].double().T
        torch.testing.assert_close(scores[head].double(), expected, atol=1e-4, rtol=1e-4)


@given(dims=st.integers(1, DIM))
def test_loki_multiplies_along_the_first_axes(dims):
    channels, chunk = some(), chunk_of(20)
    axes = torch.tensor(channels.axes[0], dtype=torch.float64)[:, :dims]
    scores = Loki(channels, dims).scores(chunk)
    for head in range(HEADS):
        q, k = (x.double() @ axes[head // 2].T for x in (chunk.q[head], chunk.k[head // 2]))
        torch.testing.assert_close(scores[head].double(), q @ k.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [DoubleSparsity, Loki])
def test_with_every_channel_they_are_exact(kind):
    assert_defined(kind(some(), DIM), chunk_of(20), lambda q, k, position, key: q @ k[key])


@pytest.mark.parametrize("kind", [DoubleSparsity, Loki])
def test_the_contract_holds(kind):
    shadowattn.check_estimator(kind(some(dim=64), 8))


def test_statistics_are_those_of_the_models_q_and_k():
    model = tiny_model(head_dim=8)
    windows = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    measured = observe_channels(model, windows, chunk_tokens=10)
    q, k = {}, {}

    def keep(chunk):
        q.setdefault(chunk.layer, []).append(chunk.q)
        k.setdefault(chunk.layer, []).append(chunk.k[:, -chunk.q.shape[1] :])

    observe_prefill(model, windows, keep, chunk_tokens=24)
    for layer in q:
        every = torch.cat(k[layer], 1).double()
        torch.testing.assert_close(torch.tensor(measured.q[layer]), torch.cat(q[layer], 1).abs().mean(1))
        torch.testing.assert_close(torch.tensor(measured.k[layer]), every.abs().mean(1).float())
        for head, axes in enumerate(torch.tensor(measured.axes[layer], dtype=torch.float64)):
            torch.testing.assert_close(axes @ axes.T, torch.eye(len(axes), dtype=torch.float64), atol=1e-9, rtol=0)
            variances = (axes @ torch.cov(every[head].T) @ axes.T).diagonal()
            expected = torch.linalg.eigvalsh(torch.cov(every[head].T)).flip(0)
            torch.testing.assert_close(variances, expected, atol=1e-5, rtol=1e-3)
    assert measured.fingerprint == fingerprint(model)
    assert ChannelStatistics(**tuples(asdict(measured))) == measured


@pytest.mark.parametrize("kind", [DoubleSparsity, Loki])
def test_statistics_of_another_model_are_refused(kind):
    model, other = tiny_model(head_dim=8), tiny_model(head_dim=8, family="llama")
    channels = observe_channels(other, torch.arange(3, 27)[None], chunk_tokens=24)
    with shadowattn.attach(other, 0.5, estimator=kind(channels, 4)), torch.no_grad():
        other(torch.arange(3, 9)[None])
    with pytest.raises(InputError, match=f"{kind.__name__} was calibrated on another model"):
        shadowattn.attach(model, 0.5, estimator=kind(channels, 4)).__enter__()
    with pytest.raises(InputError, match=r"kept|dims"):
        kind(channels, 10_000)


def test_statistics_that_are_none_are_refused():
    good = some()
    with pytest.raises(InputError, match="channels: expected q"):
        replace(good, k=good.q)
    with pytest.raises(InputError, match="got NaN or infinity"):
        replace(good, q=torch.full((1, HEADS, DIM), torch.nan).tolist())
    with pytest.raises(InputError, match="expected tables of numbers"):
        replace(good, q="some")
    with pytest.raises(InputError, match="channels: expected a"):
        Loki(None)
    with pytest.raises(InputError, match="measure them on this model"):
        Loki(good).scores(replace(chunk_of(20), layer=1))
