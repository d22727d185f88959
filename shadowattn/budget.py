"""How many keys a query row keeps. One definition, for the specification and for every fast path."""

import math
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


def keep_counts(retention: Tensor, visible: Tensor, min_budget: int = 1) -> Tensor:
    """min(visible, max(min_budget, ceil(retention × visible))) keys, int64 [H, rows].

    For retention float64 [H] and visible int64 [rows]. With a least budget of one key it is the rule of the authors' device code;
    their offline code instead pools 32 rows and keeps int(retention × n) + 1.
    """
    keep = torch.ceil(retention[:, None] * visible).to(torch.int64)  # by products in float64
    return keep.clamp_(min=min_budget).minimum(visible)


def keep_count(retention: float, visible: int, min_budget: int = 1) -> int:
    """The same for one row of one head, without tensors: a decoding step has no time for them."""
    return min(max(math.ceil(retention * visible), min_budget), visible)


def shared_keep_counts(retention: Tensor, visible: Tensor, query_block: int, min_budget: int = 1) -> Tensor:
    """How many keys before its block a shared list keeps, int64 [H, B]; arguments as in `keep_counts`, rows next to one another.

    A shared list also holds the block's own keys, of which row i of n uses i + 1. So that sharing changes which keys are
    kept and not how many, the rows of a block together keep as many keys as their own lists would:
    n · count + n (n + 1) / 2 is the sum of their budgets, or up to n − 1 more. Early blocks, whose own keys are more than
    that, keep one key before them; all blocks keep so many that their first row has its least budget.
    """
    first = visible[::query_block]
    rows = torch.full_like(first, query_block)
    rows[-1] = len(visible) - (len(first) - 1) * query_block
    budgets = keep_counts(retention, visible, min_budget)
    budgets = torch.nn.functional.pad(budgets, (0, -len(visible) % query_block))
    spare = budgets.view(len(retention), len(first), query_block).sum(2) - rows * (rows + 1) // 2
    return (-(-spare // rows)).clamp(min=max(1, min_budget - 1)).minimum(first - 1)


def key_block_counts(budgets: Tensor, visible: Tensor, key_block: int, min_budget: int = 1) -> Tensor:
    """How many blocks of `key_block` keys a row keeps whose own list holds whole blocks, int64 [H, rows]; arguments int64.

    As many as its budget [H, rows] fills, rounded up, and so many that they hold `min_budget` keys though of one of them, the
    last, the row may see a single key; or all of them.
    """
    least = 1 + -(-(min_budget - 1) // key_block)
    return (-(-budgets // key_block)).clamp(min=least).minimum(-(-visible // key_block))
