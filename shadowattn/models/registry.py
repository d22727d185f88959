"""Puts an attention of our own into a model of transformers, through its two public registries, and takes it out again."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from shadowattn.errors import InputError
from shadowattn.exclusive import current_work
from shadowattn.models.masks import describe_mask, window_of
from shadowattn.models.requests import LayerState, Requests, cached_keys, check_logits_to_keep, decoding_rows
from shadowattn.models.shape import ModelShape, attention_modules, check_device, decoder_of, layer_of, model_shape
from shadowattn.online.attention import Request

LayerAttention = Callable[[int, Tensor, Tensor, Tensor, float, Request], Tensor]
"""(layer, q [batch, H, Q, D], k, v [batch, G, K, D] with the whole cache, scale, request) → [batch, H, Q, D], causal."""

WindowedAttention = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]
"""(q [batch, H, Q, D], k, v [batch, G, K, D] up to the last query's own key, scale, window) → [batch, H, Q, D]: each row sees
its own key and the `window` − 1 keys before it."""

_NAME = "shadowattn"
# What models hand on to every attention function although none computes with it. `position_ids` count for the mask alone.
_HARMLESS = frozenset(
    ("position_ids", "cache_position", "use_cache", "output_router_logits", "output_hidden_states", "return_dict", "is_causal")
)
_logger = logging.getLogger(__name__)


@contextmanager
def replace_attention(
    model: PreTrainedModel,
    attention: LayerAttention,
    windowed: WindowedAttention | None = None,
    *,
    by_layer: bool = False,
) -> Iterator[None]:
    """Every layer's attention computed by `attention` instead; the model's own is restored on leaving.

    Layers with a sliding window are computed by `windowed`, and refused where that is None. Causal inference without padding
    only: a gradient, a padding mask or any other mask, packed sequences, a static cache and whatever else changes the scores
    raise `InputError`, and so does a forward pass of the decoder in which not every layer attended exactly once. `by_layer`:
    layers may also be called one by one. Otherwise a layer that attends outside of a forward pass of the decoder is refused: the
    pass began before, in another thread, and would be part dense; and so is leaving while another thread is inside one.
    """
    check_device(model)
    modules, shape = attention_modules(model), model_shape(model)
    if any(module in _REPLACED for module in modules):
        raise InputError("the model's attention is replaced already; leave the outer context first")
    decoder = decoder_of(model)
    # Masks are made by the decoder's config, attention by its layers'; a vision model's stays as it is.
    configs = list({id(m.config): m.config for m in (decoder, *modules)}.values())
    if any(config in _ATTACHED for config in map(id, configs)):
        raise InputError("another model with the same config object is attached; give each its own: copy.deepcopy(model.config)")
    # A shallow copy of an attached model's config kept the name beyond the context.
    before = [str(getattr(config._attn_implementation, "before", config._attn_implementation)) for config in configs]
    # Both registries need the name: without a mask function the model would run, but see the future.
    AttentionInterface.register(_NAME, _dispatch)
    AttentionMaskInterface.register(_NAME, describe_mask)
    replacement = _Replacement(attention, windowed, shape, [m.layer_idx for m in modules], by_layer)
    hooks = [decoder.register_forward_pre_hook(_begin_forward), decoder.register_forward_hook(_end_forward, always_call=True)]
    hooks += [module.register_forward_pre_hook(_enter_layer, with_kwargs=True) for module in modules]
    hooks += [model.register_forward_pre_hook(_begin_logits, with_kwargs=True)]
    hooks += [model.register_forward_hook(_end_logits, always_call=True)]
    try:
        _REPLACED[model] = _REPLACED[decoder] = replacement, -1
        for row, module in enumerate(modules):
            _REPLACED[module] = replacement, row
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = _AttachedName(name)
            _ATTACHED.add(id(config))
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
            _ATTACHED.discard(id(config))
        for module in (model, decoder, *modules):
            _REPLACED.pop(module, None)
        for hook in hooks:
            hook.remove()
        left = sum(work != current_work() for work in replacement.calls)  # its own was interrupted, and is over
    if left:
        raise InputError(
            f"the attention was restored while {left} forward pass(es) of other threads were running, which will be part dense; "
            "wait for them before leaving, and throw their results away"
        )


@contextmanager
def bypass_layer(model: PreTrainedModel, layer: int) -> Iterator[None]:
    """The decoder layer around attention `layer` returns the hidden states it was given (the layer ablation of section 3.2)."""

    def identity(module, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    around = layer_of(model, attention_modules(model)[layer])
    handle = around.register_forward_hook(identity, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@dataclass
class _Replacement:
    """One model's attention while it is replaced.

    `calls` counts each layer's within a forward pass of the decoder, `entered` holds the request of the layer that is at work,
    and `logits_to_keep` of how many rows logits are computed, for each piece of work (`exclusive.current_work`) apart: several
    threads may run the model at once.
    """

    attention: LayerAttention
    windowed: WindowedAttention | None
    shape: ModelShape
    layers: list[int]
    by_layer: bool = False
    calls: dict[object, dict[int, int]] = field(default_factory=dict)
    entered: dict[object, tuple[int, Any, LayerState]] = field(default_factory=dict)
    logits_to_keep: dict[object, int] = field(default_factory=dict)
    requests: Requests = field(default_factory=Requests)
    windows: dict[int, int] = field(default_factory=dict)


# Kept outside of the modules, so that a copy or a pickle of the model finds nothing of it. The decoder is an entry too.
_REPLACED: WeakKeyDictionary[nn.Module, tuple[_Replacement, int]] = WeakKeyDictionary()


# The configs, by id, of models that are attached: they live as long.
_ATTACHED: set[int] = set()


class _AttachedName(str):
    """The registered name in a config of an attached model. Copied or pickled, it turns into the name that was there before."""

    def __new__(cls, before: str):
        name = super().__new__(cls, _NAME)
        name.before = before
        return name

    def __deepcopy__(self, memo):
        return self.before

    def __reduce_ex__(self, protocol):
        return str, (self.before,)


@torch.compiler.disable
def _begin_logits(model, args, kwargs):
    if model in _REPLACED:
        count = kwargs.get("logits_to_keep")
        if isinstance(count, int):  # assisted generation never gives the indices of rows
            check_logits_to_keep(count)
            _REPLACED[model][0].logits_to_keep[current_work()] = count


@torch.compiler.disable
def _end_logits(model, args, output):
    if model in _REPLACED:
        _REPLACED[model][0].logits_to_keep.pop(current_work(), None)


def _begin_forward(decoder, args):
    # A copy of the model keeps the hooks, but has no entry; attached itself, it has them twice.
    if decoder in _REPLACED:
        if decoder.training and any(getattr(part, "gradient_checkpointing", False) for part in decoder.modules()):
            # Its layers run without gradients now and once more in the backward pass, outside of this context perhaps.
            raise InputError("gradient checkpointing is on, and sparse attention has no gradient; call model.eval()")
        replacement, _ = _REPLACED[decoder]
        replacement.calls[current_work()] = dict.fromkeys(range(len(replacement.layers)), 0)


@torch.compiler.disable
def _enter_layer(module, args, kwargs):
    """Before a layer adds to its cache: only now can be seen which keys were there before."""
    if module not in _REPLACED:
        return
    replacement, row = _REPLACED[module]
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    state = replacement.requests.layer(cache, row)
    state.enter(cached_keys(cache, module.layer_idx))
    replacement.entered[current_work()] = row, cache, state


def _end_forward(decoder, args, output):
    replacement, _ = _REPLACED.get(decoder, (None, -1))
    if replacement is not None:
        replacement.entered.pop(current_work(), None)
    calls = None if replacement is None else replacement.calls.pop(current_work(), None)
    if calls is None:
        return
    missed = [replacement.layers[row] for row, count in calls.items() if count == 0]
    if output is None:  # an error inside is on its way out
        return
    if missed:
        raise InputError(
            f"layers {missed} did not ask for their attention in this forward pass; use another model (docs/models.md)"
        )
    if len(replacement.windows) == len(replacement.layers):
        raise InputError(
            f"every layer has a sliding window ({sorted(set(replacement.windows.values()))} tokens), so there is nothing to make "
            "sparse; use a model with layers of full attention"
        )


@torch.compiler.disable
def _dispatch(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """transformers' attention signature on one side, `LayerAttention` on the other."""
    if module not in _REPLACED:
        raise InputError(
            "this model is not attached, but shares its config with one that is, or has a shallow copy of it; give each its own "
            "config: copy.deepcopy(model.config)"
        )
    replacement, row = _REPLACED[module]
    layer, shape = module.layer_idx, replacement.shape
    window = window_of(layer, attention_mask, kwargs.pop("sliding_window", None))
    _check_call(layer, module, dropout, kwargs)
    _check_tensors(layer, shape, query, key, value)
    if window is None and key.shape[2] > shape.context_tokens:
        raise InputError(f"prompt: the model's context is {shape.context_tokens} tokens, got {key.shape[2]}; shorten the prompt")
    calls = replacement.calls.get(current_work())
    if calls is None and not replacement.by_layer:
        raise InputError(
            f"layer {layer} attends outside of a forward pass of the model that began inside this context; call the whole model, "
            "and attach before any thread calls it"
        )
    if calls is not None:
        calls[row] += 1
        if calls[row] > 1:
            raise InputError(f"layer {layer} attends more than once in a forward pass; use another model (docs/models.md)")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if window is None:
        out = _attend(replacement, row, layer, query, key, value, scale)
    else:
        out = _attend_window(replacement, row, window, query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None


def _attend(replacement: _Replacement, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    entered, cache, state = replacement.entered.get(current_work(), (row, None, LayerState()))
    if entered != row:  # a layer that calls another one's attention: nothing is known of its request
        cache, state = None, LayerState()
    rows, caches = q.shape[2], state.begin(len(k))
    steps = decoding_rows(rows, k.shape[2] - rows, replacement.logits_to_keep.get(current_work(), 1))
    outs = []
    if steps < rows:
        ends = k.shape[2] - steps  # of the prompt
        prompt = q[:, :, : rows - steps], k[:, :, :ends], v[:, :, :ends]
        outs.append(replacement.attention(row, *prompt, scale, Request(False, caches)))
    if steps:
        outs.append(replacement.attention(row, q[:, :, rows - steps :], k, v, scale, Request(True, caches)))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
    after = cached_keys(cache, layer)
    if after is not None:
        state.leave(after)
    return out


def _attend_window(replacement: _Replacement, row: int, window: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    layer = replacement.layers[row]
    if replacement.windowed is None:
        raise InputError(
            f"layer {layer} has a sliding window of {window} tokens, which this stage does not support; use a model without"
        )
    if row not in replacement.windows:
        replacement.windows[row] = window
        _logger.info("layer %d has a sliding window of %d tokens and stays dense within it", layer, window)
    return replacement.windowed(q, k, v, scale, window)


def _check_call(layer: int, module: nn.Module, dropout: float, kwargs: dict) -> None:
    """Refuses whatever would change the result and is not computed here. An unknown argument might, so it is refused too."""
    if dropout:
        raise InputError(f"layer {layer} asks for attention dropout of {dropout}, which is not computed; call model.eval()")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise InputError(f"layer {layer} asks for attention that is not causal, which is not computed; use a causal model")
    for name, value in kwargs.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise InputError(f"layer {layer} uses {name}, which shadowAttn does not support; leave it out or use another model")


def _check_tensors(layer: int, shape: ModelShape, q: Tensor, k: Tensor, v: Tensor) -> None:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise InputError(
            f"layer {layer}: a gradient is required, and there is none through selected keys; call the model under "
            "torch.no_grad()"
        )
    heads, dim = q.shape[1], q.shape[3]
    if v.shape[3] != dim:
        raise InputError(
            f"layer {layer}: expected queries, keys and values of one dimension, got {dim} for queries and {v.shape[3]} for "
            "values (multi-head latent attention); use a model of a family that works (docs/models.md)"
        )
    if (heads, dim) != (shape.heads, shape.head_dim) or heads % k.shape[1] or k.shape != v.shape:
        raise InputError(
            f"layer {layer}: expected {shape.heads} query heads and q, k, v of {shape.head_dim} dimensions, got q "
            f"{list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; use a model whose layers are all of one shape"
        )
