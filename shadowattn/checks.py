"""What public functions ask of what they are given: type, dtype, shape, device, layout, range. Raises `InputError`, by name.

Each check returns what it was given, as the plain Python type where there is one, so that a numpy integer goes no further.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from shadowattn.errors import InputError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST = 2**31 - 1  # indices are int32
CPU = torch.device("cpu")
_FLOAT32 = torch.finfo(torch.float32)


def fields(part: Any, check: Callable[..., Any], *names: str, **limits: Any) -> None:
    """Puts fields of a dataclass, frozen or not, through one check, each by its name, and keeps what the check returns."""
    for name in names:
        object.__setattr__(part, name, check(name, getattr(part, name), **limits))


def flag(name: str, value: Any) -> bool:
    """A bool, Python's or numpy's; no number and no text."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{name}: expected true or false, got {shown(value)}")
    return bool(value)


def integer(name: str, value: Any, *, least: int = 0, most: int = MOST, limit: str = "") -> int:
    """An int, Python's or numpy's, from `least` to `most`; no bool, fraction, string or array. `limit` says what `most` is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InputError(f"{name}: expected an integer, got {shown(value)}; give a whole number such as {max(least, 1)}")
    if not least <= value <= most:
        raise InputError(f"{name}: expected an integer of {least} … {most}{f', {limit}' if limit else ''}, got {value}")
    return int(value)


def number(name: str, value: Any, *, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite real number, Python's or numpy's, from `least` to `most`, and no bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{name}: expected a number, got {shown(value)}")
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise InputError(f"{name}: expected a finite number, got {value}")
    if not least <= converted <= most:
        raise InputError(f"{name}: expected a number of {least:g} … {most:g}, got {value}")
    return converted


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    converted = number(name, value)
    if not converted > 0:
        raise InputError(f"{name}: expected a positive number, got {value}")
    return converted


def softmax_scale(value: Any, dim: int) -> float:
    """What multiplies q·k before the softmax: a number above 0 that float32 holds; 1/√D for None."""
    if value is None:
        return 1 / math.sqrt(dim)
    converted = number("scale", value)
    if not _FLOAT32.tiny <= converted <= _FLOAT32.max:
        raise InputError(
            f"scale: expected a positive number that float32 holds, got {value}: keys of larger q·k are kept, so 0 or less has "
            "no meaning; leave it out for 1/√D"
        )
    return converted


def one_of(name: str, value: Any, options: Sequence[str]) -> str:
    """One of some names."""
    if not isinstance(value, str) or value not in options:
        raise InputError(f"{name}: expected one of {', '.join(options)}, got {shown(value)}")
    return value


def instance(name: str, value: Any, kind: type, remedy: str) -> None:
    """An object of a class; `remedy` says how to get one."""
    if not isinstance(value, kind):
        raise InputError(f"{name}: expected a {kind.__name__}, got {shown(value)}; {remedy}")


def sequence(name: str, values: Any) -> list:
    """A list, from any iterable but text; of a tensor or an array, its Python numbers."""
    if isinstance(values, Tensor | np.ndarray):
        return values.tolist() if values.ndim else sequence(name, values.item())
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise InputError(f"{name}: expected a sequence, got {shown(values)}")
    return list(values)


def numbers_of(name: str, values: Any) -> list[float]:
    """Finite numbers, from any sequence."""
    return [number(name, value) for value in sequence(name, values)]


_CONVERT = {torch.int64: "long", torch.int32: "int", torch.bool: "bool"}


def tensors(dtypes: Sequence[torch.dtype] = FLOATS, **arguments: Tensor) -> None:
    """Dense tensors on one device, all of the same of some dtypes."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name}: expected a torch.Tensor, got {shown(x)}; convert it with torch.from_numpy or torch.tensor")
        if x.layout != torch.strided or x.is_nested:
            raise InputError(f"{name}: expected a dense tensor, got layout {x.layout}; use {name}.to_dense()")
        if x.is_neg():
            raise InputError(f"{name}: expected a tensor of its own values, got a lazily negated view; use {name}.clone()")
        if x.is_meta:
            raise InputError(f"{name}: expected a tensor with values, got one on the meta device; load or compute it first")
        if x.dtype not in dtypes:
            raise InputError(
                f"{name}: expected {_names(dtypes)}, got {x.dtype}; convert it with {name}.{_CONVERT.get(dtypes[0], 'float')}()"
            )
    if len(arguments) == 1:
        return
    if len({x.dtype for x in arguments.values()}) > 1:
        listing = ", ".join(f"{name} {x.dtype}" for name, x in arguments.items())
        raise InputError(f"expected {', '.join(arguments)} of one dtype, got {listing}; convert them to the same one")
    if len({x.device for x in arguments.values()}) > 1:
        listing = ", ".join(f"{name} on {x.device}" for name, x in arguments.items())
        raise InputError(f"expected {', '.join(arguments)} on one device, got {listing}; move them to the same one")


def placed(device: torch.device, **arguments: Tensor) -> None:
    """Tensors on one device."""
    for name, x in arguments.items():
        if x.device != device:
            where = "in the CPU's memory" if device == CPU else f"on {device}"
            raise InputError(f"{name}: expected a tensor {where}, got one on {x.device}; use {name}.to({str(device)!r})")


def without_gradient(**arguments: Tensor) -> None:
    """No tensor whose gradient would be lost without a word."""
    for name, x in arguments.items():
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{name}: expected a tensor without gradient, got one that requires it, and sparse attention has none; call it "
                f"under torch.no_grad(), or give {name}.detach()"
            )
        # Forward-mode derivatives travel beside the values, whatever the mode of gradients.
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise InputError(
                f"{name}: expected a tensor without a tangent, got one of forward-mode differentiation, and sparse attention has "
                f"no derivative; leave torch.autograd.forward_ad.dual_level, or give {name}.detach()"
            )


def finite_products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Values whose products and sums float32 holds, scaled or not."""
    largest = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        low, high = (float(end) for end in torch.aminmax(x.detach()))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InputError(f"expected finite q, k and v, got NaN or infinity in {name}; a ranking of keys would mean nothing")
        largest[name] = max(-low, high)
    products = largest["q"] * largest["k"] * q.shape[-1] * max(scale, 1.0)
    if products > _FLOAT32.max or max(largest.values()) > _FLOAT32.max:
        peaks = ", ".join(f"{name} {value:.3g}" for name, value in largest.items())
        raise InputError(f"expected scale · q·k within float32, got scale {scale:.3g} and values up to {peaks}; use smaller ones")


def causal_offset(value: Any, *, rows: int, keys: int) -> int:
    """The first row's position: such that every row's own key exists."""
    offset = integer("causal_offset", value, least=-MOST)
    if not 0 <= offset <= keys - rows:
        raise InputError(f"causal_offset: expected 0 … K − Q = {keys - rows}, so that every row's own key exists, got {offset}")
    return offset


def vector(name: str, x: Tensor, length: int, *, dtype: torch.dtype = torch.int64, device: torch.device = CPU) -> None:
    """A contiguous vector of one dtype and length, by default in the CPU's memory, where C++ reads it."""
    tensors((dtype,), **{name: x})
    placed(device, **{name: x})
    if x.shape != (length,) or not x.is_contiguous():
        raise InputError(f"{name}: expected {length} values one after another, got shape {list(x.shape)}, strides {x.stride()}")


def ascending(name: str, x: Tensor, *, least: int, below: int) -> None:
    """Values of an int64 vector that never fall, from `least` to under `below`."""
    values = x.numpy()  # a torch operation takes several times as long as numpy's on so few values
    if len(values) == 0 or values[0] < least or values[-1] >= below or (values[1:] < values[:-1]).any():
        raise InputError(
            f"{name}: expected ascending values of {least} … {below - 1}, got {shown(x)} {values[:4]} … {values[-4:]}"
        )


def within(name: str, x: Tensor, *, least: int, most: int) -> None:
    """Values of an int64 vector, from `least` to `most`."""
    values = x.numpy()
    if len(values) and (values.min() < least or values.max() > most):
        raise InputError(f"{name}: expected values of {least} … {most}, got {values.min()} … {values.max()}")


def shown(value: Any) -> str:
    """A value in an error: what it is, at a length that a line holds."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {list(value.shape)} of {value.dtype}"
    text = repr(value)
    return f"{text if len(text) < 80 else text[:76] + ' …'} ({type(value).__name__})"


def _names(dtypes: Sequence[torch.dtype]) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
