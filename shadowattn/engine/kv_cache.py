"""The KV cache of one sequence: keys and values of every layer, and beside them what estimators derive from the keys."""

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.models.shape import ModelShape
from shadowattn.online.cache import LayerCache

_LEAST = 256  # tokens that are made room for at first


class KVCache:
    """Token-major: a token's keys of all heads lie side by side, so that a chunk is written in one piece.

    Grows by doubling up to the model's context. `tokens` are the ids whose keys and values it holds, so that a prompt that begins
    alike need not be computed again. `owner`: whose weights and arithmetic made them.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype = torch.float32, owner: str = ""):
        self._shape, self._dtype, self.owner = shape, dtype, owner
        self.tokens: list[int] = []
        self._held = [self._memory(0) for _ in range(shape.layers)]
        self.derived = [LayerCache() for _ in range(shape.layers)]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def capacity(self) -> int:
        """The tokens that there is memory for."""
        return self._held[0].shape[1]

    @property
    def bytes(self) -> int:
        """Of keys and values, used or not."""
        return sum(held.nbytes for held in self._held)

    def reserve(self, tokens: int) -> None:
        """Makes room for so many tokens in all. Raises `InputError` beyond the model's context."""
        most = self._shape.context_tokens
        if tokens > most:
            raise InputError(f"prompt: the model's context is {most} tokens, got {tokens}; shorten the prompt")
        if tokens <= self.capacity:
            return
        capacity = min(most, max(tokens, 2 * self.capacity, _LEAST))
        with torch.inference_mode(False):  # torch forbids to write later to what was made in inference mode
            for layer, held in enumerate(self._held):
                grown = self._memory(capacity)
                grown[:, : len(self)] = held[:, : len(self)]
                self._held[layer] = grown

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Takes in k and v [n, G, D] behind the tokens held, and returns all keys and values, [G, K, D] each: views, no copies.

        `extend` says that all layers have theirs.
        """
        held, start, end = self._held[layer], len(self), len(self) + len(k)
        held[0, start:end], held[1, start:end] = k, v
        keys, values = held[:, :end].transpose(1, 2)
        return keys, values

    def guess(self, layer: int, k: Tensor) -> Tensor:
        """All keys [G, K, D] with k [n, G, D] in the place of those that `write` will take in: valid until then."""
        held, start, end = self._held[layer], len(self), len(self) + len(k)
        held[0, start:end] = k
        return held[0, :end].transpose(0, 1)

    def extend(self, tokens: list[int]) -> None:
        """All layers hold keys and values of these tokens now."""
        self.tokens += tokens

    def crop(self, length: int) -> None:
        """Forgets the tokens from `length` on."""
        checks.integer("length", length, most=len(self))
        del self.tokens[length:]
        for derived in self.derived:
            derived.crop(length)

    def shared_with(self, tokens: list[int]) -> int:
        """With how many of its own tokens a text begins."""
        pairs = zip(self.tokens, tokens, strict=False)
        return next((at for at, (held, other) in enumerate(pairs) if held != other), min(len(self.tokens), len(tokens)))

    def _memory(self, tokens: int) -> Tensor:
        return torch.empty(2, tokens, self._shape.kv_heads, self._shape.head_dim, dtype=self._dtype)
