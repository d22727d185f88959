"""A Llama or Qwen2 as a GGUF file without a tokenizer, for peers that read no other."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from experiments.progress import bar
from shadowattn import checks
from shadowattn.errors import InputError

if TYPE_CHECKING:
    from gguf import GGUFWriter

_FAMILIES = ("llama", "qwen2")
_WEIGHTS = {"F32": 1, "F16": 1, "Q8_0": 32}  # and how many numbers of a row share a scale
_REMEDY = "set path to a file of the model, or leave the runner out"


def check_gguf(config: PreTrainedConfig, *, weights: str = "Q8_0") -> None:
    """Raises `InputError` where a file of such a model cannot be written, or would be read as another model."""
    checks.one_of("weights", weights, tuple(_WEIGHTS))
    if find_spec("gguf") is None:
        raise InputError("gguf: expected the package, found none; install it with: pip install gguf")
    if config.model_type not in _FAMILIES:
        raise InputError(f"gguf: expected a model of the family {' or '.join(_FAMILIES)}, got {config.model_type}; {_REMEDY}")
    kinds = {*(getattr(config, "layer_types", None) or ()), config.rope_parameters.get("rope_type", "default"), config.hidden_act}
    if others := kinds - {"full_attention", "default", "silu"}:
        raise InputError(
            f"gguf: expected full attention, plain rotary positions and the activation silu, got {', '.join(sorted(others))}; "
            f"{_REMEDY}"
        )
    rows = {config.hidden_size, config.intermediate_size, config.num_attention_heads * _head_dim(config)}
    if any(count % _WEIGHTS[weights] for count in rows):
        raise InputError(
            f"gguf: expected channels that are multiples of {_WEIGHTS[weights]} for {weights}, got "
            f"{', '.join(map(str, sorted(rows)))}; {_REMEDY}"
        )


def write_gguf(model: PreTrainedModel, path: Path, *, weights: str = "Q8_0") -> None:
    """Writes `model`, its matrices in `weights` (F32, F16 or Q8_0), norms and biases in float32.

    Tokens are numbers alone in it: a reader is given ids. Raises `InputError` as `check_gguf` does.
    """
    check_gguf(model.config, weights=weights)
    import gguf

    config, kind = model.config, gguf.GGMLQuantizationType[weights]
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, config.model_type.upper()), config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, config.model_type)
    _describe(writer, config)
    tensors = model.state_dict()
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, tensor in bar(tensors.items(), "GGUF file"):
        values, stored = _ordered(name, tensor.float(), config).numpy(), names.get_name(name, (".weight", ".bias"))
        stored_kind = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quants.quantize(np.ascontiguousarray(values), stored_kind), raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: "GGUFWriter", config: PreTrainedConfig) -> None:
    head_dim = _head_dim(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _ordered(name: str, values: Tensor, config: PreTrainedConfig) -> Tensor:
    """Q and K of a Llama as llama.cpp turns them: neighbours in pairs, where transformers pairs the two halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return values
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
