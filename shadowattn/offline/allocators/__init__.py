"""Allocators: from importance to a retention for every head. One file each.

To add one: a frozen dataclass derived from `Allocator` in a file of its own name, and a YAML of that name in `conf/allocator/`.
"""

from collections.abc import Sequence

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.models.shape import ModelShape
from shadowattn.offline.allocators.base import Allocator, Retention
from shadowattn.plugins import parts_of
from shadowattn.types import Importance

__all__ = ["BY_NAME", "Allocator", "Retention", "allocate", "allot", "check_importance"]

BY_NAME = parts_of(__name__, Allocator)


def allocate(
    head_ppl: Sequence[Sequence[float]],
    layer_ppl: Sequence[float],
    *,
    base_ppl: float,
    retention: float,
    method: str,
    **parameters,
) -> Retention:
    """Retentions [L][H] by the allocator named `method`, with its default parameters, or with some of them given.

    `head_ppl` [L][H] and `layer_ppl` [L]: perplexities with that head ablated, that layer bypassed; `base_ppl`: with nothing
    changed; `retention`: the mean to spread, in (0, 1]. Raises `InputError` on ragged tables, perplexities that are not positive
    and finite, a retention out of range, an unknown method, and a missing `sensitivity` (error_greedy) or `path` (file).
    """
    checks.one_of("allocator", method, tuple(BY_NAME))
    heads = [_perplexities("head_ppl", layer) for layer in checks.sequence("head_ppl", head_ppl)]
    layers, base_ppl = _perplexities("layer_ppl", layer_ppl), checks.positive("base_ppl", base_ppl)
    check_importance(heads, layers, base_ppl, checks.number("retention", retention))
    return BY_NAME[method](**parameters).allocate(heads, layers, base_ppl=base_ppl, retention=float(retention))


def allot(allocator: Allocator, shape: ModelShape, retention: float, importance: Importance | None = None) -> Retention:
    """Retentions [L][H] by an allocator; `importance` None for one that does not need it."""
    if importance is None:
        importance = Importance(((1.0,) * shape.heads,) * shape.layers, (1.0,) * shape.layers, 1.0, "none", 0)
    check_importance(importance.head_ppl, importance.layer_ppl, importance.base_ppl, retention)
    return allocator.allocate(importance.head_ppl, importance.layer_ppl, base_ppl=importance.base_ppl, retention=retention)


def _perplexities(name: str, values: Sequence[float]) -> list[float]:
    return [checks.positive(name, value) for value in checks.sequence(name, values)]


def check_importance(head_ppl: Retention, layer_ppl: list[float], base_ppl: float, retention: float) -> None:
    """Raises `InputError` where the tables are ragged or a value cannot be a perplexity or a retention."""
    if not head_ppl or len(head_ppl) != len(layer_ppl) or len({len(layer) for layer in head_ppl}) != 1 or not head_ppl[0]:
        raise InputError(
            f"importance: expected head_ppl [L][H] and layer_ppl [L], got {[len(layer) for layer in head_ppl]} heads "
            f"in {len(head_ppl)} layers and {len(layer_ppl)} layer values; measure the importance again"
        )
    values = [base_ppl, *layer_ppl, *(value for layer in head_ppl for value in layer)]
    if not all(0 < value < float("inf") for value in values):
        raise InputError("importance: expected positive, finite perplexities, got others; measure the importance again")
    if not 0 < retention <= 1:
        raise InputError(f"retention: expected a value in (0, 1], got {retention}; 1 keeps every key")
