"""Heavy hitters: the keys that earlier rows attended to most, and the nearest (H2O, arXiv 2306.14048, section 4)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.budget import keep_counts
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.pages import ALWAYS
from shadowattn.types import EstimateCost


class Received:
    """The attention that each key has received of the rows so far, by head; it grows by whole chunks.

    Where the keys are cut inside a chunk, what that chunk's rows attended to is forgotten altogether.
    """

    def __init__(self):
        self.length = 0
        self._totals: dict[int, list[tuple[int, int, Tensor]]] = {}  # of a head, after each chunk: keys, rows, float32 [keys]

    def extend(self, k: Tensor) -> None:
        self.length = k.shape[1]

    def crop(self, length: int) -> None:
        self.length = length
        self._totals = {head: [one for one in totals if one[0] <= length] for head, totals in self._totals.items()}

    def before(self, chunk: Chunk) -> Tensor:
        """What the chunk's keys received of the rows before the chunk, float32 [H, K]; 0 for its own keys."""
        received = chunk.q.new_zeros(len(chunk.heads), chunk.keys, dtype=torch.float32)
        for place, head in enumerate(chunk.heads.ids.tolist()):
            for end, _, total in reversed(self._totals.get(head, [])):
                if end <= chunk.first_position:
                    received[place, :end] = total
                    break
        return received

    def add(self, chunk: Chunk, received: Tensor) -> None:
        """Keeps what all keys have received [H, K] after the chunk, in place of what was said of it before."""
        rows, end = len(chunk.positions), int(chunk.positions[-1]) + 1
        for head, total in zip(chunk.heads.ids.tolist(), received, strict=True):
            earlier = [one for one in self._totals.get(head, []) if one[0] <= chunk.first_position]
            # Of a decode's tokens the last is enough; nobody goes back to one before it.
            kept = [one for one in earlier[:-1] if one[1] > 1] + earlier[-1:]
            self._totals[head] = [*kept, (end, rows, total[:end].clone())]


@dataclass(frozen=True)
class H2O(Estimator):
    """A key scores the attention that rows of earlier chunks paid to it; a share `recent` of a budget goes to the nearest.

    The budget here is the one by retention, whatever the rule's `min_budget`.

    Departures: the paper evicts keys for good, here a key may come back; it adds up attention on what is kept, here the exact
    attention to all keys; a prompt's own rows rank by chunks before theirs alone, so that nobody looks into the future. The exact
    attention is what the estimate costs.
    """

    recent: float = 0.5
    sees: ClassVar[str] = "earlier_rows"

    def __post_init__(self):
        checks.fields(self, checks.number, "recent", least=0, most=1)

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        """With the sums of the softmax and of what a key receives."""
        return EstimateCost.of(head_dim, 32) + EstimateCost.adding(2)

    def prepare(self, chunk: Chunk) -> None:
        self._received(chunk)

    def scores(self, chunk: Chunk) -> Tensor:
        received = self._received(chunk)
        before = received.before(chunk)
        distance = chunk.positions[:, None] - torch.arange(chunk.keys, device=chunk.q.device)
        attention = torch.softmax((Oracle().scores(chunk) * chunk.scale).masked_fill_(distance < 0, -torch.inf), -1)
        received.add(chunk, before + attention.sum(1))
        near = torch.ceil(self.recent * keep_counts(chunk.retention, chunk.positions + 1).float()).clamp(min=1)[..., None]
        forced = ALWAYS * (2 - distance / near)
        return torch.where((distance >= 0) & (distance < near), forced, before[:, None])

    def _received(self, chunk: Chunk) -> Received:
        return chunk.cache.derived("attention received", Received, chunk.k)
