"""The weights of a decoder as plain tensors, read from a model of transformers: what the engine's blocks are built of.

A layer of the families here is: RMS norm; Q, K and V; rotary embedding; attention; output projection; residual; RMS norm; gate
and up projection; activation; down projection; residual.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shadowattn.errors import InputError
from shadowattn.models.shape import ModelShape, check_device, fingerprint, model_shape

FAMILIES = ("llama", "qwen2", "qwen3")
ACTIVATIONS = ("silu", "relu")
# Rotary embeddings whose angles depend on the position alone. Others change with the length of the prompt.
_ROPES = ("default", "linear", "llama3", "yarn")
_UNIT_BIASES = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class LayerWeights:
    """One layer, in the model's dtype. E hidden, F intermediate, H query and G key/value heads of D; matrices are [out, in]."""

    input_norm: Tensor  # [E]
    qkv: Tensor  # [(H + 2G)·D, E], the rows of Q, then of K, then of V
    qkv_bias: Tensor | None  # [(H + 2G)·D]
    q_norm: Tensor | None  # [D], RMS norm of every head before the rotary embedding (Qwen3)
    k_norm: Tensor | None
    out: Tensor  # [E, H·D]
    mlp_norm: Tensor  # [E]
    gate: Tensor  # [F, E]
    up: Tensor  # [F, E]
    down: Tensor  # [E, F]


@dataclass(frozen=True)
class Decoder:
    """A whole decoder. `cos` and `sin` [T, D] are float32, of every position of the model's context."""

    shape: ModelShape
    hidden: int
    intermediate: int
    activation: str
    norm_eps: float
    fingerprint: str
    embedding: Tensor  # [V, E]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [E]
    head: Tensor  # [V, E]
    cos: Tensor
    sin: Tensor

    @property
    def scale(self) -> float:
        """What a head's products are multiplied with before the softmax."""
        return self.shape.head_dim**-0.5


def read_decoder(model: PreTrainedModel) -> Decoder:
    """The weights of a model of one of `FAMILIES`, shared with it where they need not be put together.

    Raises `InputError` on another family, on sliding windows, on another rotary embedding or activation than are known here, on
    biases that the families' published models do not have, and on weights that are not in the CPU's memory.
    """
    check_decoder(model)
    config, body, shape = model.config.get_text_config(), model.get_decoder(), model_shape(model)
    layers = tuple(_layer(layer) for layer in body.layers)
    positions = torch.arange(shape.context_tokens)[None]
    with torch.no_grad():
        cos, sin = body.rotary_emb(torch.zeros(1), positions)
    return Decoder(
        shape=shape,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        activation=config.hidden_act,
        norm_eps=config.rms_norm_eps,
        fingerprint=fingerprint(model),
        embedding=body.embed_tokens.weight.detach(),
        layers=layers,
        final_norm=body.norm.weight.detach(),
        head=model.get_output_embeddings().weight.detach(),
        cos=cos[0],
        sin=sin[0],
    )


def check_decoder(model: PreTrainedModel) -> None:
    """Raises `InputError` as `read_decoder` does, and reads no weights."""
    check_family(model)
    config = model.config.get_text_config()
    if (device := check_device(model)).type != "cpu":
        raise InputError(f"engine: expected the model in the CPU's memory, got {device}; load it with device=cpu")
    if windows := [kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"]:
        raise InputError(f"engine: expected full attention in every layer, got {windows[0]} in {len(windows)} layers")
    if config.hidden_act not in ACTIVATIONS:
        raise InputError(f"engine: expected an activation of {', '.join(ACTIVATIONS)}, got {config.hidden_act}")
    if (rope := config.rope_parameters["rope_type"]) not in _ROPES:
        raise InputError(f"engine: expected a rotary embedding of {', '.join(_ROPES)}, got {rope}, which depends on the length")
    for layer in model.get_decoder().layers:
        for name in _UNIT_BIASES:
            if layer.get_submodule(name).bias is not None:
                raise InputError(
                    f"engine: expected no bias in {name}, got one; use shadowattn.attach, which runs the model's own layers"
                )


def check_family(model: PreTrainedModel) -> None:
    """Raises `InputError` on a model of another family than `FAMILIES`."""
    kind = model.config.get_text_config().model_type
    if kind not in FAMILIES:
        raise InputError(
            f"engine: expected a model of {', '.join(FAMILIES)}, got {kind}; use shadowattn.attach, which runs the model's own "
            "layers"
        )


def _layer(layer: nn.Module) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [one.bias for one in projections]
    norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=torch.cat([one.weight.detach() for one in projections]),
        qkv_bias=None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
        q_norm=None if norms[0] is None else norms[0].weight.detach(),
        k_norm=None if norms[1] is None else norms[1].weight.detach(),
        out=attention.o_proj.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate=mlp.gate_proj.weight.detach(),
        up=mlp.up_proj.weight.detach(),
        down=mlp.down_proj.weight.detach(),
    )
