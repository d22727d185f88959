"""Factors on channels of Q and K, in the projections."""

import pytest
import torch

from shadowattn.errors import InputError
from shadowattn.evaluation.outliers import observe_channels, rescalings
from shadowattn.models.channels import channel_factors
from shadowattn.models.shape import model_shape
from shadowattn.offline.attention_ranges import observe_attention_ranges, observe_prepared_ranges
from shadowattn.offline.key_offsets import observe_key_offset
from tests.tiny import tiny_model

WINDOWS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def rescaled(model):
    channels = observe_channels(model, WINDOWS, chunk_tokens=16)
    return rescalings(channels, observe_key_offset(model, WINDOWS, how="mean", chunk_tokens=16))


@torch.no_grad()
def test_logits_stay_and_ranges_are_those_of_the_rescaled_tensors(model, rescaled):
    before, logits = {name: x.clone() for name, x in model.state_dict().items()}, model(WINDOWS).logits
    expected = observe_prepared_ranges(model, WINDOWS, {"": rescaled["equalised"]}, chunk_tokens=16)[""]
    with channel_factors(model, rescaled["equalised"].factor):
        torch.testing.assert_close(model(WINDOWS).logits, logits, rtol=1e-4, atol=1e-5)
        found = observe_attention_ranges(model, WINDOWS, chunk_tokens=16)
    for name in ("q", "k", "v", "scores"):
        torch.testing.assert_close(
            torch.tensor(getattr(found, name)), torch.tensor(getattr(expected, name)), rtol=1e-4, atol=1e-5
        )
    after = model.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    largest = torch.tensor(found.q).amax(), torch.tensor(found.k).amax()
    assert largest[0] == pytest.approx(largest[1], rel=0.5)  # one range for both, but for the heads' own largest channels


def test_an_error_inside_leaves_the_weights_as_they_were(model, rescaled):
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), channel_factors(model, rescaled["equalised"].factor):
        _ = 1 / 0
    assert all(torch.equal(model.state_dict()[name], x) for name, x in before.items())


def test_factors_that_rope_would_mix_are_refused(model):
    shape = model_shape(model)
    factors = [torch.ones(shape.kv_heads, shape.head_dim) for _ in range(shape.layers)]
    factors[-1][0, 0] = 2.0
    with pytest.raises(InputError, match="one for each pair"), channel_factors(model, factors):
        pass
    with pytest.raises(InputError, match="for each of"), channel_factors(model, factors[:-1]):
        pass


def test_another_family_is_refused(monkeypatch, model):
    monkeypatch.setattr(model.config, "model_type", "qwen3")  # which norms Q and K behind its projections
    with pytest.raises(InputError, match="got qwen3"), channel_factors(model, []):
        pass
