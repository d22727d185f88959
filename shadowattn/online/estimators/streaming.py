"""Attention sinks and a recent window: the content-independent baseline (StreamingLLM, arXiv 2309.17453)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.types import Heads


@dataclass(frozen=True)
class Streaming:
    """The first `sinks` keys outrank all; after them, later keys outrank earlier ones. The budget sets the window."""

    sinks: int = 4
    scores_are_finite: ClassVar[bool] = True

    def __post_init__(self):
        object.__setattr__(self, "sinks", checks.integer("sinks", self.sinks))

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor, heads: Heads | None = None) -> Tensor:
        count, rows, _ = q.shape
        keys = k.shape[1]
        key = torch.arange(keys, dtype=torch.float32)
        # A row's own key comes before the sinks: with a budget of one, attending to itself is the sane choice.
        own = torch.arange(keys) == positions[:, None]
        score = torch.where(key < self.sinks, 2 * keys - key, key) + own * 4.0 * keys
        return score.expand(count, rows, keys)
