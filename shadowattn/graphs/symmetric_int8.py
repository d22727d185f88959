"""Symmetric INT8: scales from a tensor, integers from a scale, and what is subtracted from keys before either.

What the graphs do inside, for those that take integers; the key offset is subtracted outside of all graphs.
"""

import math

import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.types import KeyOffset

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_TINY = torch.finfo(torch.float32).tiny
_PART_BYTES = 4 << 20  # copied at a time: a long prompt's keys would otherwise be there twice


def in_parts(x: Tensor) -> tuple[Tensor, ...]:
    """x [heads, rows, D] as some rows after others: few enough at a time that a copy of them is small."""
    return x.split(max(1, _PART_BYTES * x.shape[1] // x.nbytes), 1) if x.nbytes > _PART_BYTES else (x,)


def absmax(x: Tensor) -> Tensor:
    """The largest magnitude of each head's rows, float32 [heads] for floats x [heads, rows, D]; NaN where there is one."""
    # Without their sign, floats are in the order of their bits, NaN last; torch reduces bfloat16 several times slower.
    bits = _BITS[x.dtype.itemsize]
    first, *others = in_parts(x.view(bits))
    magnitudes = first.bitwise_and(torch.iinfo(bits).max)
    # Axis by axis: torch reduces two of a transposed tensor at once several times slower.
    largest = magnitudes.amax(1).amax(1)
    for part in others:  # into the same memory: from new pieces of the heap each time little is given back
        torch.bitwise_and(part, torch.iinfo(bits).max, out=magnitudes[:, : part.shape[1]])
        largest = torch.maximum(largest, magnitudes[:, : part.shape[1]].amax(1).amax(1))
    return largest.view(x.dtype).float()


def absmax_scales(x: Tensor) -> Tensor:
    """The real value of one integer step, absmax / 127 over each head's rows; float32 [heads] for x [heads, rows, D].

    Raises `InputError` on NaN or infinity, whose ranking would mean nothing, and where there are no values at all.
    """
    if 0 in x.shape[1:]:
        raise InputError(f"expected at least one row and one dimension, got q or k of shape {list(x.shape)}")
    return step_scales(absmax(x))


def step_scales(largest: Tensor) -> Tensor:
    """`absmax_scales` of what the largest magnitudes float32 [heads] are of. Raises `InputError` on NaN or infinity."""
    magnitudes = largest.tolist()
    if not all(map(math.isfinite, magnitudes)):
        raise InputError("expected finite q and k, got NaN or infinity; a ranking of keys would mean nothing")
    # Quotients in double, rounded once more, are those in float32, and take less time than an operation of torch after a kernel.
    return torch.tensor([max(x, _TINY) / INT8_MAX for x in magnitudes], dtype=torch.float32, device=largest.device)


def quantise(x: Tensor, scales: Tensor) -> Tensor:
    """int8 of x [heads, rows, D]: round half to even of x / scale, clipped to ±127."""
    integers, first, steps = torch.empty(x.shape, dtype=torch.int8, device=x.device), 0, scales[:, None, None]
    for part in in_parts(x):
        steps_away = part / steps if x.dtype == torch.float32 else part.float().div_(steps)
        integers[:, first : first + part.shape[1]] = steps_away.round_().clamp_(-INT8_MAX, INT8_MAX)
        first += part.shape[1]
    return integers


def products(q8: Tensor, k8: Tensor) -> Tensor:
    """Integer products of q8 [..., rows, D] and k8 [..., K, D], exact in float32 [..., rows, K], of 8 bits at most.

    Numbers up to 256 are exact in every format that torch may be told to multiply float32 in, TF32 and bfloat16 too, and it sums
    in float32, where integers below 2²⁴ are exact. Raises `InputError` beyond 1040 dimensions, whose sums may be larger.
    """
    dim, most = q8.shape[-1], 2**24 // INT8_MAX**2
    if dim > most:
        raise InputError(f"expected at most {most} dimensions, whose INT8 products float32 sums exactly, got {dim}")
    return q8.float() @ k8.float().mT


def shifted(k: Tensor, key_offset: KeyOffset | None, layer: int, groups: slice | Tensor = slice(None)) -> Tensor:
    """K minus the layer's key offset, float32 [g, K, D] of the key/value heads `groups` of k [G, K, D]; K where there is none.

    Raises `InputError` where the offset was calibrated for another number of layers, of heads or of dimensions.
    """
    offset = offset_of(k, key_offset, layer)
    if offset is None:
        return k[groups]
    keys, offset = k[groups].float(), offset[groups, None]
    copied = isinstance(groups, Tensor) or k.dtype != torch.float32
    return keys.sub_(offset) if copied else keys - offset


def offset_of(k: Tensor, key_offset: KeyOffset | None, layer: int) -> Tensor | None:
    """The layer's offset [G, D], where k [G, K, D] is; None where there is none. Raises `InputError` as `shifted` does."""
    if key_offset is None:
        return None
    offset = key_offset.of(layer).to(k.device)
    if offset.shape != (k.shape[0], k.shape[2]):
        raise InputError(
            f"key_offset: expected [G, D] = {[k.shape[0], k.shape[2]]} for layer {layer}, got {list(offset.shape)}; calibrate a "
            "key offset on this model"
        )
    return offset
