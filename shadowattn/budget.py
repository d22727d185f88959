"""How many keys a query row keeps. One definition, for the specification and for every fast path."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError


def head_retentions(retention: float | Tensor | Sequence[float], heads: int) -> Tensor:
    """The retention of every head, float64 [H], from one number for all or from one number a head.

    Raises `InputError` where it is no number, sequence, tensor or array of numbers, where a value is outside (0, 1], or where
    their number is not `heads`.
    """
    values = _values(retention)
    values = values * heads if len(values) == 1 else values
    if len(values) != heads:
        raise InputError(f"retention: expected one value or one for each of {heads} query heads, got {len(values)}")
    if not all(0 < value <= 1 for value in values):
        raise InputError(f"retention: expected values in (0, 1], got {values}; 1 keeps every key")
    return torch.tensor(values, dtype=torch.float64)


def _values(retention: float | Tensor | Sequence[float]) -> list[float]:
    if isinstance(retention, Tensor):
        if retention.dtype == torch.bool or retention.is_complex() or retention.dim() > 1 or retention.is_meta:
            raise InputError(f"retention: expected real numbers, one or [H], got {checks.shown(retention)}")
        checks.without_gradient(retention=retention)
        exact = retention.dtype == torch.float64
        return [value if exact else _shortest(value) for value in retention.reshape(-1).tolist()]
    if isinstance(retention, np.floating | np.ndarray):
        if retention.ndim > 1 or retention.dtype.kind not in "fiu":
            raise InputError(f"retention: expected real numbers, one or [H], got {checks.shown(retention)}")
        exact = retention.dtype.itemsize >= 8
        return [value if exact else _shortest(value) for value in retention.reshape(-1).tolist()]
    if isinstance(retention, list | tuple):
        return checks.numbers_of("retention", retention)
    return [checks.number("retention", retention)]


def _shortest(value: float) -> float:
    """A float32 0.2 is 0.2000000030: taken literally it would keep one key too many of every multiple of five. Its shortest
    decimal form is what its author meant."""
    return float(str(np.float32(value)))


def keep_counts(retention: Tensor, visible: Tensor) -> Tensor:
    """max(1, ceil(retention × visible)) keys, int64 [H, rows], for retention float64 [H] and visible int64 [rows].

    The rule of the authors' device code; their offline code instead pools 32 rows and keeps int(retention × n) + 1.
    """
    keep = torch.ceil(retention[:, None] * visible[None, :].to(torch.float64)).to(torch.int64)
    return keep.clamp(min=1).minimum(visible[None, :])
