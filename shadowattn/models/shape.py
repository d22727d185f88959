"""The shape of a model of transformers, which of its modules attend, and which checkpoint it is."""

import hashlib
import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from shadowattn.errors import InputError


@dataclass(frozen=True)
class ModelShape:
    """What the stages need to know of a model.

    `layers` counts the layers that attend: a hybrid's recurrent layers are none of them.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int


def model_shape(model: PreTrainedModel) -> ModelShape:
    """The shape of a decoder-only model, read from its attention modules and its config.

    Raises `InputError` where `attention_modules` does, and on a model whose config names no number of heads or no context.
    """
    modules = attention_modules(model)
    config = model.config.get_text_config()
    heads = _config_number(model, config, "num_attention_heads")
    return ModelShape(
        layers=len(modules),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(modules[0], "head_dim", None) or _config_number(model, config, "hidden_size") // heads,
        context_tokens=_config_number(model, config, "max_position_embeddings"),
    )


def _config_number(model: PreTrainedModel, config: PreTrainedConfig, name: str) -> int:
    try:
        value = getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        value = "one for each layer"
    if not isinstance(value, int):
        raise InputError(
            f"{type(model).__name__}: expected a config with one {name} for all layers, got {value}; use a model of a "
            "family that works (docs/models.md)"
        )
    return value


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over every parameter's name, shape and a sample of its values: which checkpoint this is.

    A sample of at most 4096 values a tensor, so that it takes milliseconds for any size; read as float32, so that the
    dtype a checkpoint is loaded in does not matter as long as it holds the same values.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().reshape(-1)
        sample = values[:: max(1, values.numel() // 4096)]
        digest.update(f"{name}{list(parameter.shape)}".encode())
        digest.update(sample.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The self-attention modules in layer order: those with a `layer_idx` whose forward asks transformers' registry.

    Raises `InputError` on a model without any, and on one with several for one layer.
    """
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"expected a model of transformers, not compiled or wrapped, got {type(model).__name__}; give the model itself"
        )
    modules = [m for m in model.modules() if hasattr(m, "layer_idx") and _asks_registry(m)]
    if not modules:
        raise InputError(
            f"{type(model).__name__}: no layer gets its attention from transformers' attention registry, so none can be "
            "replaced; use a model of a family that works (docs/models.md)"
        )
    indices = [m.layer_idx for m in modules]
    if None in indices or indices != sorted(set(indices)):
        raise InputError(
            f"{type(model).__name__}: expected a decoder with at most one self-attention a layer, found {len(modules)} for "
            f"layers {sorted(set(indices), key=str)} (cross-attention, an encoder or layers used in turns); use a model of a "
            "family that works (docs/models.md)"
        )
    return modules


def attended_layers(model: PreTrainedModel) -> list[int]:
    """The numbers of the decoder layers that attend, one for each row of a profile's table."""
    return [module.layer_idx for module in attention_modules(model)]


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of the model that holds all layers that attend."""
    modules = set(attention_modules(model))
    # get_decoder() may find an output layer of that name; without it the whole model is what a forward pass runs.
    return next(part for part in (model.get_decoder(), model) if modules <= set(part.modules()))


def layer_of(model: PreTrainedModel, attention: nn.Module) -> nn.Module:
    """The decoder layer around an attention module."""
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
    return next(block for blocks in lists for block in blocks if attention in block.modules())


def _asks_registry(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def check_device(model: nn.Module) -> torch.device:
    """The device that all of a model's weights are on. Raises `InputError` where they are on several, or have no values."""
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices):
        raise InputError(
            "model: some weights are on the meta device and have no values; load them all (no device_map, no offloading)"
        )
    if len(devices) != 1:
        raise InputError(
            f"model: expected all weights on one device, got {', '.join(sorted(map(str, devices)))}; call model.to(DEVICE)"
        )
    return devices.pop()
