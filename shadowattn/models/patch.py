"""The one file that knows transformers' internals: a model's attention is replaced through its public registries.

Every patch is a context manager and is undone, whatever happens inside.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8 import Int8
from shadowattn.online.prefill import SparsePrefill
from shadowattn.types import RetentionProfile

LayerAttention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, q [batch, H, Q, D], k, v [batch, G, K, D] with the whole cache, scale) → [batch, H, Q, D], causal."""

_NAME = "shadowattn"
# Attention variants that change the scores. Silently ignoring one would make every number wrong.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux")


@dataclass(frozen=True)
class ModelShape:
    """What the stages need to know of a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int


def model_shape(model: PreTrainedModel) -> ModelShape:
    """The shape of a decoder-only model, read from its attention modules and its config."""
    modules = attention_modules(model)
    config = model.config.get_text_config()
    return ModelShape(
        layers=len(modules),
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=modules[0].head_dim,
        context_tokens=config.max_position_embeddings,
    )


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


@contextmanager
def attach(
    model: PreTrainedModel,
    profile: RetentionProfile,
    bank: GraphBank | None,
    *,
    estimator: Estimator | None = None,
    **options,
) -> Iterator[SparsePrefill]:
    """Makes a Hugging Face causal LM use shadowAttn in prefill, and undoes it on leaving.

    Yields the `SparsePrefill` in use, whose `counters` tell what ran. The estimate comes from `bank`, or from `estimator`
    where one is given (`bank` may then be None). `options` go to `SparsePrefill`; its chunks are as high as the bank's graphs
    unless they say otherwise. Raises `InputError` where the profile is another
    model's, or the bank was not built for the model's head dimension.
    """
    shape, own = model_shape(model), fingerprint(model)
    if profile.fingerprint != own:
        raise InputError(
            f"profile: it was made for {profile.model} ({profile.fingerprint[:12]}), the model is {own[:12]}; "
            "run the offline stage for this model"
        )
    if (len(profile.retention), len(profile.retention[0])) != (shape.layers, shape.heads):
        raise InputError(
            f"profile: expected {shape.layers} layers × {shape.heads} heads, got {len(profile.retention)} × "
            f"{len(profile.retention[0])}; run the offline stage for this model"
        )
    if estimator is None:
        if bank is None:
            raise InputError("expected a bank or an estimator, got neither; build one with GraphBank.build(profile, shapes)")
        bank.check_profile(profile)
        if shape.head_dim not in {s.head_dim for s in bank.shapes}:
            raise InputError(
                f"head_dim: the model's is {shape.head_dim}, the bank was built for "
                f"{sorted({s.head_dim for s in bank.shapes})}; build a bank for this model"
            )
        estimator = Int8(bank)
    if bank is not None:
        options = {"chunk_tokens": max(s.rows for s in bank.shapes)} | options
    sparse = SparsePrefill(profile.retention, estimator, **options)
    with replace_attention(model, sparse):
        yield sparse


@contextmanager
def replace_attention(model: PreTrainedModel, attention: LayerAttention) -> Iterator[None]:
    """Every layer's attention computed by `attention` instead; the model's own is restored on leaving.

    Causal decoding without padding only: a padding mask, packed sequences, a static cache, sliding windows and other
    changes to the scores raise `InputError`.
    """
    modules = attention_modules(model)
    before = model.config._attn_implementation
    if before == _NAME:
        raise InputError("the model's attention is replaced already; leave the outer context first")
    AttentionInterface.register(_NAME, _dispatch)
    # Both registries need the name: without a mask function the model would run, but see the future.
    AttentionMaskInterface.register(_NAME, _refuse_masks)
    try:
        for module in modules:
            module.layer_attention = attention
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        for module in modules:
            module.__dict__.pop("layer_attention", None)


@contextmanager
def bypass_layer(model: PreTrainedModel, layer: int) -> Iterator[None]:
    """Decoder layer `layer` returns the hidden states it was given (the layer ablation of section 3.2)."""

    def identity(module, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = model.get_decoder().layers[layer].register_forward_hook(identity, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The self-attention modules in layer order: what transformers gives a `layer_idx` and a `head_dim`."""
    modules = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "head_dim")]
    if not modules or [m.layer_idx for m in modules] != list(range(len(modules))):
        raise InputError(
            f"{type(model).__name__}: expected a decoder with one self-attention a layer (Qwen2, Llama and their kin), found "
            f"{len(modules)} such modules; use another model"
        )
    return modules


def _dispatch(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """transformers' attention signature on one side, `LayerAttention` on the other."""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise InputError(f"layer {module.layer_idx} uses {name}, which shadowAttn does not support; use another model")
    limit = module.config.max_position_embeddings
    if key.shape[2] > limit:
        raise InputError(f"prompt: the model's context is {limit} tokens, got {key.shape[2]}; shorten the prompt")
    scale = module.head_dim**-0.5 if scaling is None else scaling
    out = module.layer_attention(module.layer_idx, query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None


def _refuse_masks(
    *, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function, attention_mask=None, **_
) -> None:
    """No mask is ever built: causality belongs to the selection. What a plain causal mask would not say is refused."""
    if attention_mask is not None and not bool(torch.all(attention_mask != 0)):
        raise InputError("expected prompts without padding, got a padding mask; run prompts of different length one by one")
    if mask_function is not causal_mask_function:
        raise InputError("expected plain causal attention, got packed sequences, a window or a custom mask; use plain prompts")
    if kv_offset or kv_length != q_offset + q_length:
        raise InputError(
            f"expected a cache that holds just the tokens so far ({q_offset + q_length}), got {kv_length} slots; "
            "use transformers' DynamicCache"
        )
