import pytest
import torch

from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import batch_losses
from shadowattn.models import replace_attention
from shadowattn.models.layerwise import hidden_states
from shadowattn.offline import measure_sensitivity
from shadowattn.offline.ablations import Ablated, TopK
from shadowattn.offline.score_gradients import score_gradients
from shadowattn.reference import topk_attention
from tests.tensors import qkv
from tests.tiny import tiny_model


def windows(count: int = 2, length: int = 160) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("retention", [0.05, 0.3, 1.0])
def test_a_head_of_few_keys_is_the_references_top_k(retention):
    q, k, v = qkv(1, 1, 300, 300, 16)
    found = TopK(retention)(q, k, v, 0.25)
    torch.testing.assert_close(found, topk_attention(q, k, v, retention, causal_offset=0, scale=0.25), atol=1e-5, rtol=0)


def test_loss_is_the_increase_with_one_head_sparse(tmp_path):
    model, ids = tiny_model(), windows()
    found = measure_sensitivity(model, ids, Units(tmp_path), measure="loss", retentions=[0.05, 0.5])
    assert found.retentions == (0.05, 0.5, 1.0)
    assert all(head[-1] == 0 for layer in found.cost for head in layer)
    base = batch_losses(model, ids, batch=2).mean()
    with replace_attention(model, Ablated(1, 2, TopK(0.05))), torch.no_grad():
        alone = batch_losses(model, ids, batch=2).mean()
    assert found.cost[1][2][0] == pytest.approx(float(alone - base), abs=1e-5)


@pytest.mark.parametrize("measure", ["error", "divergence"])
def test_cost_falls_as_more_is_kept_and_resumes(measure, tmp_path):
    model, ids = tiny_model(), windows()
    options = {"measure": measure, "retentions": [0.05, 0.2, 0.6]}
    whole = measure_sensitivity(model, ids, Units(tmp_path / "whole"), **options)
    for layer in whole.cost:
        for head in layer:
            assert head == tuple(sorted(head, reverse=True))
            assert head[0] > 0

    def stop(work):
        yield from work[:1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(model, ids, Units(tmp_path / "parts"), progress=stop, **options)
    assert measure_sensitivity(model, ids, Units(tmp_path / "parts"), **options) == whole


def test_gradients_give_the_divergence_of_a_small_change():
    """Of a change of one row of one layer's output, averaged over many draws of the model's tokens."""
    model, (window,) = tiny_model(), windows(1, 24)
    layer, row = 0, 9
    change = 1e-2 * torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(3))

    def changed(module, args, output):
        hidden_states(output)[:, row] += change  # in place: the layer's output, whatever it comes in

    with torch.no_grad():
        before = torch.log_softmax(model(input_ids=window[None]).logits[0].double(), -1)
        handle = model.get_decoder().layers[layer].register_forward_hook(changed)
        after = torch.log_softmax(model(input_ids=window[None]).logits[0].double(), -1)
        handle.remove()
    divergence = float((before.exp() * (before - after)).sum())
    gradients = score_gradients(model, window.expand(2000, -1), seed=0)[layer][:, row].double()
    assert divergence == pytest.approx(float((gradients @ change.double()).square().mean() / 2), rel=0.15)
    assert gradients.mean(0).abs().max() < 0.2 * gradients.std(0).max()  # a score has no mean


def test_divergence_weighs_the_change_of_a_layers_output_by_its_gradient(tmp_path):
    """Every row's change times its gradient, squared, half, mean over rows; computed here from whole forward passes."""
    model, ids = tiny_model(), windows()
    found = measure_sensitivity(model, ids, Units(tmp_path), measure="divergence", retentions=[0.1], seed=5)
    outputs = []
    handle = model.get_decoder().layers[1].register_forward_hook(lambda _, __, out: outputs.append(hidden_states(out).clone()))
    with torch.no_grad():
        for attention in (Ablated(1, 2, TopK(1.0)), Ablated(1, 2, TopK(0.1))):
            with replace_attention(model, attention):
                model(input_ids=ids, use_cache=False)
    handle.remove()
    along = ((outputs[1] - outputs[0]) * score_gradients(model, ids, seed=5)[1]).sum(-1)
    assert found.cost[1][2][0] == pytest.approx(float(along.square().mean() / 2), rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measure": "taste"}, "error, divergence, loss"),
        ({"retentions": []}, "ascending"),
        ({"retentions": [0.5, 0.1]}, "ascending"),
        ({"retentions": [0.0]}, "ascending"),
    ],
)
def test_refuses_what_makes_no_sense(change, message, tmp_path):
    with pytest.raises(InputError, match=message):
        measure_sensitivity(tiny_model(), windows(), Units(tmp_path), **({"measure": "error", "retentions": [0.1]} | change))
