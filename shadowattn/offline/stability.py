"""How sure an importance is: what would have come out of half of the text, or of other windows like these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shadowattn.errors import InputError
from shadowattn.offline.importance import summarise
from shadowattn.types import AblationLosses, Importance


@dataclass(frozen=True)
class Stability:
    """`*_rank`: Spearman's correlation between the loss increases that even and odd windows give, over heads and over layers.

    `retention_spread` [L][H]: standard deviation of each head's retention over resamples of the windows.
    """

    head_rank: float
    layer_rank: float
    retention_spread: tuple[tuple[float, ...], ...]

    @property
    def mean_spread(self) -> float:
        return float(np.mean(self.retention_spread))

    @property
    def largest_spread(self) -> float:
        return float(np.max(self.retention_spread))


def stability(
    losses: AblationLosses, allot: Callable[[Importance], list[list[float]]], *, resamples: int = 20, seed: int = 0
) -> Stability:
    """The spread is that of `resamples` resamples. Raises `InputError` where there are fewer than two windows."""
    count = min(len(losses.base), *(len(head) for layer in losses.heads for head in layer), *map(len, losses.layers))
    if count < 2:
        raise InputError(f"stability: expected at least 2 calibration windows, got {count}; set importance.windows")
    even, odd = (summarise(losses, windows=range(first, count, 2)) for first in (0, 1))
    generator = torch.Generator().manual_seed(seed)
    resampled = []
    for _ in range(resamples):
        chosen = torch.randint(count, (count,), generator=generator).tolist()
        resampled.append(allot(summarise(losses, windows=chosen)))
    return Stability(
        head_rank=rank_correlation(increases(even), increases(odd)),
        layer_rank=rank_correlation(layer_increases(even), layer_increases(odd)),
        retention_spread=tuple(map(tuple, np.std(np.array(resampled), 0).tolist())),
    )


def increases(importance: Importance) -> list[float]:
    """Loss increase of every head, in nat, row-major."""
    return (np.log(np.array(importance.head_ppl)) - np.log(importance.base_ppl)).ravel().tolist()


def layer_increases(importance: Importance) -> list[float]:
    """Loss increase of every layer, in nat."""
    return (np.log(np.array(importance.layer_ppl)) - np.log(importance.base_ppl)).tolist()


def rank_correlation(one: Sequence[float], two: Sequence[float]) -> float:
    """Spearman's ρ, ties sharing their mean rank; 1 where nothing differs in either."""
    ranks = [_ranks(np.asarray(values, dtype=float)) for values in (one, two)]
    if any(np.ptp(values) == 0 for values in ranks):
        return 1.0 if all(np.ptp(values) == 0 for values in ranks) else 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
