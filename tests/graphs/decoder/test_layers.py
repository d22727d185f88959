"""Layers in one graph, a graph each, one graph for all, and in a loop compute the same, which is transformers' own."""

import numpy as np
import pytest
import torch

from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.graphs.decoder.layers import OUT, StepSizes, loop_graph, one_graph, shared_graph, step_tensors
from shadowattn.models.decoder import read_decoder
from tests.tiny import tiny_model

ROWS, PAST, LAYERS = 5, 7, 3
FLOAT = {"INFERENCE_PRECISION_HINT": "f32"}


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def step(request):
    """A decoder, the sizes of a step, its inputs, and what transformers computes: hidden, and new keys of every layer."""
    model = tiny_model(layers=LAYERS, family=request.param)
    decoder = read_decoder(model)
    tokens = torch.randint(0, 128, (1, PAST + ROWS), generator=torch.Generator().manual_seed(0))
    kept = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, given, out: kept.append(out))
    with torch.no_grad():
        cache = model(tokens).past_key_values
    hook.remove()
    half = decoder.shape.head_dim // 2
    sin = torch.cat([-decoder.sin[:, :half], decoder.sin[:, half:]], 1)
    cos, sin = (table[PAST : PAST + ROWS][None, :, None] for table in (decoder.cos, sin))
    hidden_keys = torch.arange(PAST + ROWS) > torch.arange(PAST, PAST + ROWS)[:, None]
    mask = torch.zeros(ROWS, PAST + ROWS).masked_fill(hidden_keys, torch.finfo(torch.float32).min)
    inputs = {"hidden": decoder.embedding[tokens[0, PAST:]][None], "mask": mask[None, None, None], "cos": cos, "sin": sin}
    inputs = {name: x.numpy() for name, x in inputs.items()}
    past = [(layer.keys[:, :, :PAST].numpy(), layer.values[:, :, :PAST].numpy()) for layer in cache.layers]
    new_keys = [layer.keys[:, :, PAST:].numpy() for layer in cache.layers]
    return decoder, StepSizes.of(decoder, rows=ROWS, past=PAST), inputs, past, kept[0][:, PAST:].numpy(), new_keys


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_all_layers_in_one_graph(step):
    decoder, sizes, inputs, past, hidden, new_keys = step
    model = core().compile_model(one_graph(sizes, step_tensors(decoder)), "CPU", FLOAT)
    cached = {
        f"past.{layer}.{kind}": x for layer, pair in enumerate(past) for kind, x in zip(("key", "value"), pair, strict=True)
    }
    out = model(inputs | cached)
    close(out[OUT], hidden)
    for layer, keys in enumerate(new_keys):
        close(out[f"present.{layer}.key"], keys)


def test_one_graph_serves_every_layer(step):
    decoder, sizes, inputs, past, hidden, new_keys = step
    tensors = step_tensors(decoder)
    model = core().compile_model(shared_graph(sizes, tensors[0]), "CPU", FLOAT)
    given = dict(inputs)
    for weights, (key, value), keys in zip(tensors, past, new_keys, strict=True):
        weights = {name: x.numpy() for name, x in weights.items()}
        out = model(given | weights | {"past.key": key, "past.value": value})
        given["hidden"] = out[OUT].copy()
        close(out["present.key"], keys)
    close(given["hidden"], hidden)


def test_a_loop_over_stacked_weights(step):
    decoder, sizes, inputs, past, hidden, new_keys = step
    model = core().compile_model(loop_graph(sizes, step_tensors(decoder)), "CPU", FLOAT)
    key, value = (np.concatenate(parts) for parts in zip(*past, strict=True))
    out = model(inputs | {"past.key": key, "past.value": value})
    close(out[OUT], hidden)
    close(out["present.key"], np.concatenate(new_keys))


def test_norms_of_q_and_k_are_refused(step):
    decoder = step[0]
    normed = type(decoder.layers[0])(**vars(decoder.layers[0]) | {"q_norm": torch.ones(64)})
    with pytest.raises(InputError, match="without norms"):
        StepSizes.of(type(decoder)(**vars(decoder) | {"layers": (normed,)}), rows=1, past=1)
