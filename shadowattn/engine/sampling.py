"""Which token comes next, of the model's logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0, the default. Otherwise a draw: of the `top_k` likeliest tokens (0: of all), of the fewest whose
    probabilities sum to `top_p`, by logits divided by the temperature. The same `seed` draws the same tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if checks.number("temperature", self.temperature) < 0:
            raise InputError(f"temperature: expected a number of at least 0, 0 for the likeliest token, got {self.temperature}")
        checks.integer("top_k", self.top_k)
        if not 0 < checks.number("top_p", self.top_p) <= 1:
            raise InputError(f"top_p: expected a share above 0 and at most 1, got {self.top_p}")
        checks.integer("seed", self.seed)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def generator(self) -> torch.Generator:
        """What one answer's tokens are drawn by. Each answer begins anew with the seed; other answers take other seeds."""
        return torch.Generator().manual_seed(self.seed)

    def next(self, logits: Tensor, generator: torch.Generator) -> int:
        """A token id, for logits [V]: one draw, where it is not greedy."""
        if self.is_greedy:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        """What is drawn from, float32 [V], for a temperature above 0."""
        logits = logits.double()  # a small temperature takes what is divided by it beyond float32's range
        logits = ((logits - logits.max()) / self.temperature).float()
        if 0 < self.top_k < len(logits):
            least = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p < 1:
            falling, order = probabilities.sort(descending=True, stable=True)
            before = falling.cumsum(0) - falling  # the likeliest token always stays
            probabilities[order[before >= self.top_p]] = 0
            probabilities /= probabilities.sum()
        return probabilities
