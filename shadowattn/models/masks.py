"""What stands for a model's attention mask while its attention is replaced: no mask is ever built."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sliding_window_causal_mask_function,
)

from shadowattn.errors import InputError


@dataclass(frozen=True)
class Window:
    """Stands for the mask of a sliding window: each row sees `tokens` keys, its own the last of them."""

    tokens: int


@dataclass(frozen=True)
class OtherMask:
    """Stands for a mask that is neither causal nor a sliding window. No harm is done until a layer is given it."""


def window_of(layer: int, mask, sliding_window: int | None) -> int | None:
    """The sliding window that this layer is to have, None for full causal attention."""
    if isinstance(mask, Window):
        if sliding_window not in (None, mask.tokens):
            raise InputError(
                f"layer {layer}: its mask has a window of {mask.tokens} tokens, its attention of {sliding_window}; use another "
                "model"
            )
        return mask.tokens
    if isinstance(mask, OtherMask):
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


@torch.compiler.disable
def describe_mask(
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
    """No mask is ever built: None stands for causal, `Window` for a sliding window, and a layer that is given another raises."""
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
        return Window(local_size)
    return OtherMask()


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
