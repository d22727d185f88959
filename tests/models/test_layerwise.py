"""A model layer by layer computes what it computes in one go."""

import pytest
import torch
from torch import nn

from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import batch_losses
from shadowattn.models.layerwise import layerwise
from shadowattn.models.linear import choose_linear, has_onednn, replace_linears
from tests.models.families import build
from tests.tiny import tiny_model


def windows(count: int = 3, length: int = 40, vocab: int = 128) -> torch.Tensor:
    return torch.randint(0, vocab, (count, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("linear", ["torch", "auto"])
@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "head_dim"),
    [("qwen2", 4, 2, 64), ("llama", 4, 4, 80), ("llama", 4, 1, 96), ("qwen2", 2, 2, 128)],
)
def test_losses_equal_the_models_own(family, heads, kv_heads, head_dim, linear):
    model = tiny_model(family=family, heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=3)
    ids = windows()
    with layerwise(model, 40, choose_linear(linear)) as layers:
        found = layers.losses(layers.rest(0, layers.embed(ids)), ids)
    torch.testing.assert_close(found, batch_losses(model, ids, batch=3), rtol=1e-5, atol=0)


def test_a_vocabulary_of_several_slices_and_rows_of_several_are_summed_right():
    model, ids = tiny_model(vocab=9001), windows(5, 128, 9001)
    with layerwise(model, 128, choose_linear("auto")) as layers:
        found = layers.losses(layers.rest(0, layers.embed(ids)), ids)
    torch.testing.assert_close(found, batch_losses(model, ids, batch=5), rtol=1e-5, atol=0)


def test_bfloat16_loses_no_more_than_its_rounding():
    model, ids = tiny_model().bfloat16(), windows()
    with layerwise(model, 40, choose_linear("auto")) as layers:
        found = layers.losses(layers.rest(0, layers.embed(ids)), ids)
    torch.testing.assert_close(found, batch_losses(model, ids, batch=3), rtol=2e-2, atol=0)


def test_unchanged_variants_are_the_layer():
    model, ids = tiny_model(), windows()
    with layerwise(model, 40, choose_linear("auto")) as layers:
        hidden = layers.embed(ids)
        same = layers.varied(0, hidden, lambda q, k, v, scale, out: out.expand(2, *out.shape))
        for variant in same:
            torch.testing.assert_close(variant, layers.layer(0, hidden))


def test_everything_is_undone_even_after_an_error():
    model, ids = tiny_model(), windows()
    before = model(ids).logits
    with pytest.raises(ZeroDivisionError), layerwise(model, 40, choose_linear("auto")) as layers:
        layers.varied(0, layers.embed(ids), lambda *_: 1 / 0)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)


def test_a_model_that_does_more_than_layers_is_refused():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, args, out: out * 0.1)
    with pytest.raises(InputError, match=r"in one go .* importance\.method=plain"), layerwise(model, 40, choose_linear("auto")):
        pass


def test_a_model_without_a_plain_output_layer_is_refused():
    model = tiny_model()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(InputError, match="linear output layer"), layerwise(model, 40, choose_linear("auto")):
        pass


def test_a_hybrid_is_refused():
    model = build("qwen3_next")
    with pytest.raises(InputError, match="attention in each of its 2 layers"), layerwise(model, 40, choose_linear("auto")):
        pass


def test_an_unknown_linear_is_refused():
    with pytest.raises(InputError, match="auto, onednn, torch"):
        choose_linear("mkl")


def test_onednn_must_be_there_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("shadowattn.models.linear.has_onednn", lambda: False)
    assert choose_linear("auto") is nn.functional.linear
    with pytest.raises(InputError, match="without; use torch"):
        choose_linear("onednn")


@pytest.mark.skipif(not has_onednn(), reason="this torch was built without oneDNN")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 5, 64)])
def test_onednns_linear_is_torchs(bias, shape):
    layer, x = nn.Linear(64, 48, bias=bias), torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(choose_linear("onednn")(x, layer.weight, layer.bias), layer(x), rtol=1e-5, atol=1e-5)
        with replace_linears(nn.Sequential(layer), choose_linear("onednn")):
            torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
