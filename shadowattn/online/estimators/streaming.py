"""Attention sinks and a recent window: the content-independent baseline (StreamingLLM, arXiv 2309.17453)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.types import EstimateCost


@dataclass(frozen=True)
class Streaming(Estimator):
    """The first `sinks` keys outrank all; after them, later keys outrank earlier ones. The budget sets the window.

    Departures: the paper evicts what leaves the window, and numbers positions by places in what is left, so that RoPE turns by
    those; here keys keep the positions of the text, and only attention passes over them. Its window has a fixed length, here a
    share of what a row sees. A row's own key comes before the sinks.
    """

    sinks: int = 4
    granularity: ClassVar[str] = "layer"
    scores_are_finite: ClassVar[bool] = True

    def __post_init__(self):
        checks.fields(self, checks.integer, "sinks")

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(0, 0)

    def scores(self, chunk: Chunk) -> Tensor:
        keys = chunk.keys
        key = torch.arange(keys, dtype=torch.float32, device=chunk.q.device)
        # A row's own key comes before the sinks: with a budget of one, attending to itself is the sane choice.
        diagonal = key == chunk.positions[:, None]  # exact in float32 up to 2²⁴ keys
        return (torch.where(key < self.sinks, 2 * keys - key, key) + diagonal * torch.full_like(key, 4.0 * keys))[None]
