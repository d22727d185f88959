"""What importance consists of: one ablation for each head, one for each layer, and the model as it is.

Ablations of one layer's heads are made together, in groups that depend on the model and the batch alone: never on what an
interrupted run had finished or on the number of shards, so that the same sums are rounded the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shadowattn.errors import InputError
from shadowattn.models.shape import ModelShape

Progress = Callable[[Sequence["AblationWork"]], Iterable["AblationWork"]]
"""Hands out pieces of work one after the other, and may show how far it is."""


@dataclass(frozen=True)
class AblationWork:
    """Heads of one layer ablated one at a time, or with no heads the whole layer bypassed.

    The layer after the last, with no heads, stands for the model as it is. `cost` is in layers that a window passes through.
    """

    layer: int
    heads: tuple[int, ...]
    cost: float

    @property
    def keys(self) -> tuple[str, ...]:
        """One name for each ablation, of its file."""
        return tuple(f"L{self.layer}_H{head}" for head in self.heads) or (f"L{self.layer}",)


def plan(shape: ModelShape, batch: int) -> list[AblationWork]:
    """All ablations of a model, layer by layer, at most `batch` heads together."""
    work = [AblationWork(shape.layers, (), 1.0)]
    for layer in range(shape.layers):
        after = shape.layers - layer
        work.append(AblationWork(layer, (), after))
        for first in range(0, shape.heads, batch):
            heads = tuple(range(first, min(first + batch, shape.heads)))
            work.append(AblationWork(layer, heads, len(heads) * (after + 0.5)))
    return sorted(work, key=lambda piece: piece.layer)


def shard(work: list[AblationWork], index: int, count: int) -> list[AblationWork]:
    """Shard `index` of `count`: pieces dealt out so that all shards cost about the same.

    Raises `InputError` where there is no such shard.
    """
    if count < 1 or not 0 <= index < count:
        raise InputError(f"shard: expected shard.count ≥ 1 and 0 ≤ shard.index < shard.count, got {index} of {count}")
    loads, mine = [0.0] * count, []
    for piece in sorted(work, key=lambda piece: -piece.cost):
        lightest = loads.index(min(loads))
        loads[lightest] += piece.cost
        if lightest == index:
            mine.append(piece)
    return sorted(mine, key=lambda piece: (piece.layer, piece.heads))
