from copy import deepcopy

import pytest
import torch
from torch import nn

from shadowattn.models import load_bundled
from shadowattn.models.linear import WidenedLinear, onednn, widen_linears, widened
from tests.tiny import tiny_model


@pytest.mark.parametrize("bias", [False, True])
def test_widened_product_is_the_float64_product_rounded(bias):
    torch.manual_seed(0)
    layer = nn.Linear(96, 40, bias=bias).bfloat16()
    x = torch.randn(2, 7, 96).bfloat16()
    expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    out = widened(x, layer.weight, layer.bias)
    assert out.dtype == torch.bfloat16
    # Half a step of bfloat16's eight bits, and what float32 summation may move a value over the middle of two steps.
    assert ((out.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_models_are_widened_where_the_processor_has_no_bfloat16_products(monkeypatch, supported):
    monkeypatch.setattr("shadowattn.models.linear.has_bfloat16_products", lambda: supported)
    loaded = load_bundled(dtype="bfloat16")
    linears = [module for module in loaded.model.modules() if isinstance(module, nn.Linear)]
    assert linears
    assert all(isinstance(module, WidenedLinear) != supported for module in linears)
    assert loaded.fingerprint == load_bundled().fingerprint


def test_widened_models_predict_what_bfloat16_models_predict(monkeypatch):
    monkeypatch.setattr("shadowattn.models.linear.has_bfloat16_products", lambda: False)
    model = tiny_model().bfloat16()
    ids = torch.arange(24)[None] % model.config.vocab_size
    copy = deepcopy(model)
    widen_linears(copy)
    assert not any(isinstance(module, WidenedLinear) for module in model.modules())
    with torch.no_grad():
        expected, out = model(ids).logits.float(), copy(ids).logits.float()
        assert torch.equal(deepcopy(copy)(ids).logits, copy(ids).logits)
    assert (expected - out).abs().max() <= 0.02 * expected.abs().max()


def test_float32_models_stay_as_they_are(monkeypatch):
    monkeypatch.setattr("shadowattn.models.linear.has_bfloat16_products", lambda: False)
    model = tiny_model()
    widen_linears(model)
    assert not any(isinstance(module, WidenedLinear) for module in model.modules())


def test_onednn_widens_too(monkeypatch):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    monkeypatch.setattr("shadowattn.models.linear.has_bfloat16_products", lambda: False)
    assert torch.equal(onednn(x, weight, None), widened(x, weight, None))
