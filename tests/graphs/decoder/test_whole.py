"""A whole decoder in the form of openvino-genai."""

import numpy as np
import pytest
import torch

from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.graphs.decoder.whole import llm_graph
from tests.tiny import tiny_model

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


@pytest.mark.parametrize(("family", "dtype", "eager", "tolerance"), [
    ("qwen2", torch.float32, False, 1e-4), ("llama", torch.float32, False, 1e-4), ("llama", torch.bfloat16, False, 0.5),
    ("qwen2", torch.float32, True, 1e-4), ("llama", torch.float32, True, 1e-4),
])  # fmt: skip
def test_its_state_goes_on_where_the_last_call_ended(family, dtype, eager, tolerance):
    model = tiny_model(family=family)
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids).logits.numpy()  # up to 5.4; in bfloat16 torch is 0.2 off
    request = core().compile_model(llm_graph(model.to(dtype), eager=eager), "CPU", EXACT).create_infer_request()
    for _ in range(2):
        for start, stop in ((0, 7), (7, 11), (11, 12)):
            logits = request.infer(given(ids[:, start:stop], stop))["logits"]
            np.testing.assert_allclose(logits, expected[:, start:stop], atol=tolerance)
        request.reset_state()


def test_an_eager_form_in_bfloat16_is_refused():
    """On processors without products in bfloat16 OpenVINO fails on its state."""
    with pytest.raises(InputError, match=r"takes weights in float32, got torch.bfloat16; convert them by model.float\(\)"):
        llm_graph(tiny_model().to(torch.bfloat16), eager=True)


def test_a_sequence_goes_on_from_the_one_that_it_is_told():
    model = tiny_model()
    request = core().compile_model(llm_graph(model), "CPU", EXACT).create_infer_request()
    ids = torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(1))
    request.infer(given(ids, 8))
    found = request.infer(given(torch.tensor([[5], [6]]), 9) | {"beam_idx": np.array([1, 1], np.int32)})["logits"]
    for row, token in enumerate((5, 6)):
        with torch.no_grad():
            expected = model(input_ids=torch.cat([ids[1:], torch.tensor([[token]])], 1)).logits[0, -1].numpy()
        np.testing.assert_allclose(found[row, -1], expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_one_operation_a_layer(dtype):
    """openvino-genai looks for it and refuses a graph without."""
    types = [node.get_type_name() for node in llm_graph(tiny_model().to(dtype)).get_ops()]
    assert types.count("ScaledDotProductAttention") == 2


@pytest.mark.parametrize("eager", [False, True])
def test_the_model_keeps_its_own_attention(eager):
    model = tiny_model()
    llm_graph(model, eager=eager)
    assert model.config._attn_implementation == "sdpa"


def given(ids, held):
    rows = ids.shape[1]
    return {
        "input_ids": ids.numpy(),
        "attention_mask": np.ones((len(ids), held), np.int64),
        "position_ids": np.tile(np.arange(held - rows, held), (len(ids), 1)),
        "beam_idx": np.arange(len(ids), dtype=np.int32),
    }
