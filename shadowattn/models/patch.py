"""The one file that knows transformers' internals: a model's attention is replaced through its public registries.

Every patch is a context manager and is undone, whatever happens inside.
"""

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sliding_window_causal_mask_function,
)

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.exclusive import current_work
from shadowattn.graphs.bank import GraphBank
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8 import Int8
from shadowattn.online.estimators.int8_device import Int8Device
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.prefill import SparsePrefill
from shadowattn.types import RetentionProfile

LayerAttention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, q [batch, H, Q, D], k, v [batch, G, K, D] with the whole cache, scale) → [batch, H, Q, D], causal."""

WindowedAttention = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]
"""(q [batch, H, Q, D], k, v [batch, G, K, D] up to the last query's own key, scale, window) → [batch, H, Q, D]: each row sees
its own key and the `window` − 1 keys before it."""

_NAME = "shadowattn"
# What models hand on to every attention function although none computes with it. `position_ids` count for the mask alone.
_HARMLESS = frozenset(
    ("position_ids", "cache_position", "use_cache", "output_router_logits", "output_hidden_states", "return_dict", "is_causal")
)
_logger = logging.getLogger(__name__)
# What `attach` hands on.
_OPTIONS = frozenset(inspect.signature(SparsePrefill).parameters) - {"retention", "estimator"}


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
    unless they say otherwise.

    The profile has a row for each layer that attends, in the order of the layers (`attended_layers` names them): a hybrid's
    recurrent layers have none and stay as they are. Layers with a sliding window are computed dense within their window,
    whatever their row says, and counted in `counters.windowed_rows`. Copies and pickles of the model made inside are dense.
    docs/models.md says for each family of transformers whether it works, and if not, why.

    Raises `InputError` where the profile is another model's, the bank was not built for the model's head dimension, the
    weights are not on the CPU, or the model's attention cannot be replaced; in a forward pass inside, where a gradient is
    needed, where a layer's attention is not plain causal softmax attention (a mask, a bias, padding, sinks, a soft cap,
    dropout), and where a layer that should have attended did not.
    """
    checks.instance("profile", profile, RetentionProfile, "the offline stage makes one for this model")
    if bank is not None:
        checks.instance("bank", bank, GraphBank, "build one with GraphBank.build(profile, shapes)")
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise InputError(f"attach: expected options out of {', '.join(sorted(_OPTIONS))}, got {', '.join(unknown)}")
    shape = model_shape(model)
    _check_device(model, ("cpu",))
    own = fingerprint(model)
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
        if shape.head_dim not in {s.head_dim for s in bank.shapes}:
            raise InputError(
                f"head_dim: the model's is {shape.head_dim}, the bank was built for "
                f"{sorted({s.head_dim for s in bank.shapes})}; build a bank for this model"
            )
        estimator = Int8(bank)
    _check_scales(estimator, profile)
    if bank is not None:
        options = {"chunk_tokens": max(s.rows for s in bank.shapes)} | options
    sparse = SparsePrefill(profile.retention, estimator, **options)
    with replace_attention(model, sparse, sparse.windowed):
        yield sparse


def _check_scales(estimator: Estimator, profile: RetentionProfile) -> None:
    """Raises `InputError` where an estimator quantises by other static scales than the profile's."""
    if isinstance(estimator, Int8 | Int8Device):
        estimator.bank.check_profile(profile)
    elif isinstance(estimator, Int8Fused) and estimator.grid is not None and estimator.grid != profile.scales:
        raise InputError("estimator: its grid is not that of the profile's scales; make it with Int8Fused(profile.scales)")


@contextmanager
def replace_attention(
    model: PreTrainedModel, attention: LayerAttention, windowed: WindowedAttention | None = None
) -> Iterator[None]:
    """Every layer's attention computed by `attention` instead; the model's own is restored on leaving.

    Layers with a sliding window are computed by `windowed`, and refused where that is None. Causal inference without padding
    only: a gradient, a padding mask or any other mask, packed sequences, a static cache and whatever else changes the scores
    raise `InputError`, and so does a forward pass of the decoder in which not every layer attended exactly once.
    """
    _check_device(model)
    modules, shape = attention_modules(model), model_shape(model)
    if any(module in _REPLACED for module in modules):
        raise InputError("the model's attention is replaced already; leave the outer context first")
    # get_decoder() may find an output layer of that name; without it the whole model is what a forward pass runs.
    decoder = next(m for m in (model.get_decoder(), model) if set(modules) <= set(m.modules()))
    # Masks are made by the decoder's config, attention by its layers'; a vision model's stays as it is.
    configs = list({id(m.config): m.config for m in (decoder, *modules)}.values())
    before = [config._attn_implementation for config in configs]
    if any(isinstance(name, _AttachedName) for name in before):
        raise InputError("another model with the same config object is attached; give each its own: copy.deepcopy(model.config)")
    # Both registries need the name: without a mask function the model would run, but see the future.
    AttentionInterface.register(_NAME, _dispatch)
    AttentionMaskInterface.register(_NAME, _describe_mask)
    replacement = _Replacement(attention, windowed, shape, [m.layer_idx for m in modules])
    hooks = decoder.register_forward_pre_hook(_begin_forward), decoder.register_forward_hook(_end_forward, always_call=True)
    try:
        _REPLACED[decoder] = replacement, -1
        for row, module in enumerate(modules):
            _REPLACED[module] = replacement, row
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = _AttachedName(name)
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
        for module in (decoder, *modules):
            _REPLACED.pop(module, None)
        for hook in hooks:
            hook.remove()


@contextmanager
def bypass_layer(model: PreTrainedModel, layer: int) -> Iterator[None]:
    """The decoder layer around attention `layer` returns the hidden states it was given (the layer ablation of section 3.2)."""

    def identity(module, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    attention = attention_modules(model)[layer]
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    around = next(block for blocks in lists for block in blocks if attention in block.modules())
    handle = around.register_forward_hook(identity, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


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


def _asks_registry(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _check_device(model: nn.Module, devices: tuple[str, ...] | None = None) -> None:
    found = sorted({parameter.device.type for parameter in model.parameters()})
    if "meta" in found:
        raise InputError(
            "model: some weights are on the meta device and have no values; load them all (no device_map, no offloading)"
        )
    if devices is not None and not set(found) <= set(devices):
        raise InputError(
            f"model: expected weights on {' or '.join(devices)}, where the kernels run, got {', '.join(found)}; call model.cpu()"
        )


@dataclass
class _Replacement:
    """One model's attention while it is replaced.

    `calls` counts each layer's within a forward pass of the decoder, for each piece of work (`exclusive.current_work`) apart:
    several threads may run the model at once.
    """

    attention: LayerAttention
    windowed: WindowedAttention | None
    shape: ModelShape
    layers: list[int]
    calls: dict[object, dict[int, int]] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)


# Kept outside of the modules, so that a copy or a pickle of the model finds nothing of it. The decoder is an entry too.
_REPLACED: WeakKeyDictionary[nn.Module, tuple[_Replacement, int]] = WeakKeyDictionary()


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


def _begin_forward(decoder, args):
    # A copy of the model keeps the hooks, but has no entry; attached itself, it has them twice.
    if decoder in _REPLACED:
        replacement, _ = _REPLACED[decoder]
        replacement.calls[current_work()] = dict.fromkeys(range(len(replacement.layers)), 0)


def _end_forward(decoder, args, output):
    replacement, _ = _REPLACED.get(decoder, (None, -1))
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


@dataclass(frozen=True)
class _Window:
    """Stands for the mask of a sliding window: each row sees `tokens` keys, its own the last of them."""

    tokens: int


@dataclass(frozen=True)
class _OtherMask:
    """Stands for a mask that is neither causal nor a sliding window. No harm is done until a layer is given it."""


@torch.compiler.disable
def _dispatch(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """transformers' attention signature on one side, `LayerAttention` on the other."""
    if module not in _REPLACED:
        raise InputError(
            "this model is not attached, but shares its config with one that is; give each its own config: "
            "copy.deepcopy(model.config)"
        )
    replacement, row = _REPLACED[module]
    layer, shape = module.layer_idx, replacement.shape
    window = _window(layer, attention_mask, kwargs.pop("sliding_window", None))
    _check_call(layer, module, dropout, kwargs)
    _check_tensors(layer, shape, query, key, value)
    if window is None and key.shape[2] > shape.context_tokens:
        raise InputError(f"prompt: the model's context is {shape.context_tokens} tokens, got {key.shape[2]}; shorten the prompt")
    calls = replacement.calls.get(current_work())
    if calls is not None:
        calls[row] += 1
        if calls[row] > 1:
            raise InputError(f"layer {layer} attends more than once in a forward pass; use another model (docs/models.md)")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if window is None:
        out = replacement.attention(row, query, key, value, scale)
    else:
        out = _attend_window(replacement, row, window, query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None


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


def _window(layer: int, mask, sliding_window: int | None) -> int | None:
    """The sliding window that this layer is to have, None for full causal attention."""
    if isinstance(mask, _Window):
        if sliding_window not in (None, mask.tokens):
            raise InputError(
                f"layer {layer}: its mask has a window of {mask.tokens} tokens, its attention of {sliding_window}; use another "
                "model"
            )
        return mask.tokens
    if isinstance(mask, _OtherMask):
        raise InputError(
            f"layer {layer}: expected plain causal attention, got packed sequences, chunks, a bidirectional or a custom mask; "
            "use plain prompts and a causal model"
        )
    if mask is not None:
        raise InputError(
            f"layer {layer}: expected no ready-made mask, got a {type(mask).__name__} (a 4-D mask, a dict of masks or a bias "
            "that the model learned); pass input_ids without one, and use a model without such a bias"
        )
    if sliding_window is not None:
        raise InputError(f"layer {layer}: a sliding window of {sliding_window} tokens without its mask; use another model")
    return None


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


@torch.compiler.disable
def _describe_mask(
    *,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=causal_mask_function,
    attention_mask=None,
    local_size=None,
    allow_is_causal_skip=True,
    **_,
):
    """No mask is ever built: None stands for causal, `_Window` for a sliding window, and a layer that is given another raises."""
    if attention_mask is not None and not bool(torch.all(attention_mask != 0)):
        raise InputError("expected prompts without padding, got a padding mask; run prompts of different length one by one")
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.shape[1] < q_offset + q_length):
        raise InputError(
            f"attention_mask: expected one value for each of the {q_offset + q_length} tokens so far, got "
            f"{list(attention_mask.shape)}; leave it out: prompts without padding need none"
        )
    if kv_offset + kv_length != q_offset + q_length:
        raise InputError(
            f"expected a cache that holds just the tokens so far ({q_offset + q_length}), got {kv_length} slots; "
            "use transformers' DynamicCache"
        )
    single = _single_sequence(mask_function)
    if single is not None:
        mask_function, allow_is_causal_skip = single, True
    if mask_function is causal_mask_function and not allow_is_causal_skip:
        raise InputError(
            "this model computes with its attention mask before attention does (to choose keys of its own, for example), and "
            "shadowAttn builds no mask; use a model of a family that works (docs/models.md)"
        )
    if mask_function is causal_mask_function and kv_offset == 0:
        return None
    if local_size is not None and _same_function(mask_function, sliding_window_causal_mask_function(local_size)):
        return _Window(local_size)
    return _OtherMask()


def _single_sequence(mask_function) -> Callable | None:
    """The mask function inside of one for packed sequences if there is but one sequence.

    Under torch.compile transformers packs every prompt: whether there are several sequences is then known at run time only.
    """
    if mask_function.__code__ is not and_masks().__code__:
        return None
    parts = _captured(mask_function)["mask_functions"]
    codes = [packed_sequence_mask_function(None).__code__, remap_positions_for_packed_sequence(None, None).__code__]
    if [part.__code__ for part in parts] != codes or bool(_captured(parts[0])["packed_sequence_mask"].any()):
        return None
    return _captured(parts[1])["mask_function"]


def _captured(function) -> dict:
    return inspect.getclosurevars(function).nonlocals


def _same_function(one, other) -> bool:
    """Whether two mask functions were made by the same code from the same values."""
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_function, one, other))
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        return type(one) is type(other) and isinstance(one, int) and one == other
    if one.__code__ is not other.__code__:
        return False
    return all(map(_same_function, _captured(one).values(), _captured(other).values()))
