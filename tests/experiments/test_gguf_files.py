"""GGUF files that we write, read again by transformers and by the package of llama.cpp's authors."""

from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM

from experiments.gguf_files import check_gguf, write_gguf
from shadowattn.errors import InputError
from tests.tiny import tiny_model


def model_of(family: str):
    return tiny_model(family=family, heads=4, kv_heads=2, head_dim=16)  # heads as wide as the model, all that transformers reads


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_the_model_that_was_written(family, tied, tmp_path):
    model = model_of(family)
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    write_gguf(model, tmp_path / "model.gguf", weights="F32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert again.config.tie_word_embeddings == tied
    ids = torch.arange(20)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_matrices_are_of_eight_bits_and_vectors_of_float32(tmp_path):
    model = model_of("qwen2")
    write_gguf(model, tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    gate = tensors["blk.0.ffn_gate.weight"]
    assert gate.tensor_type == GGMLQuantizationType.Q8_0
    expected = model.model.layers[0].mlp.gate_proj.weight.detach()
    error = torch.from_numpy(dequantize(gate.data, gate.tensor_type)) - expected
    assert 0 < error.abs().max() <= expected.abs().max() / 127
    assert tensors["blk.0.attn_q.bias"].tensor_type == tensors["output_norm.weight"].tensor_type == GGMLQuantizationType.F32
    torch.testing.assert_close(torch.from_numpy(tensors["output_norm.weight"].data.copy()), model.model.norm.weight.detach())


@pytest.mark.parametrize(
    ("changed", "weights", "message"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "F32", "plain rotary positions .*got linear; set path"),
        ({"hidden_act": "gelu"}, "F32", "the activation silu, got gelu"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "F32", "expected full attention, .*got sliding_attention"),
        ({"intermediate_size": 100}, "Q8_0", "multiples of 32 for Q8_0, got 64, 100"),
        ({}, "Q4_K", "weights: expected one of F32, F16, Q8_0, got 'Q4_K'"),
    ],
)
def test_other_models_are_refused_before_a_file_is_there(changed, weights, message, tmp_path):
    model = model_of("llama")
    for name, value in changed.items():
        setattr(model.config, name, value)
    with pytest.raises(InputError, match=message):
        write_gguf(model, tmp_path / "model.gguf", weights=weights)
    assert not any(tmp_path.iterdir())


def test_another_family_is_refused():
    with pytest.raises(InputError, match="expected a model of the family llama or qwen2, got qwen3; set path to a file"):
        check_gguf(SimpleNamespace(model_type="qwen3"))
