"""How soon, and how often, greedy decoding would go another way than with dense attention: divergent tokens.

First divergent token and share of divergent tokens, as "Divergent Token Metrics" (arXiv 2311.01544, section 3) defines them. Both
are measured along what dense attention generates, with those tokens given: up to the first divergent one that is what the method
itself generates, and behind it every position is still asked about the same text. All rows are rows of a prompt, so that a
sparse method selects keys for the generated ones too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.prefill import prefill_chunks
from shadowattn.errors import InputError


@dataclass(frozen=True)
class Divergence:
    """By prompt: `firsts`, the tokens before the first that differs, all of them where none does; `shares` of those that do."""

    firsts: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def first(self) -> float:
        """The mean over prompts."""
        return sum(self.firsts) / len(self.firsts)

    @property
    def share(self) -> float:
        """The mean over prompts."""
        return sum(self.shares) / len(self.shares)

    def metrics(self) -> dict[str, float]:
        """The means and, of both, the least and the largest of a prompt: tokens of one prompt say much the same."""
        parts = {"first_divergent_token": (self.first, self.firsts), "divergent_tokens": (self.share, self.shares)}
        spread = {f"{name}_{end.__name__}": float(end(each)) for name, (_, each) in parts.items() for end in (min, max)}
        return {name: mean for name, (mean, _) in parts.items()} | spread


class DenseContinuations:
    """What the model as it is generates after all but the last `tokens` tokens of some windows [W, T].

    Each is made when it is first asked for, and kept.
    """

    def __init__(self, model: PreTrainedModel, windows: Tensor, *, tokens: int, chunk_tokens: int):
        if not 1 <= tokens < windows.shape[1]:
            raise InputError(
                f"generated tokens: expected 1 to {windows.shape[1] - 1}, the window's {windows.shape[1]} tokens less a prompt, "
                f"got {tokens}; generate fewer, or take longer windows"
            )
        self._model, self._windows, self._tokens, self._chunk_tokens = model, windows, tokens, chunk_tokens
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Prompt and continuation int64 [T], and the likeliest token int64 [tokens] at every position that is generated.

        Not inside a context that replaces the model's attention. The second is what one more pass over the first finds, in chunks
        as a method's own: where two tokens are equally likely but for rounding, it may be another than was generated.
        """
        if index not in self._kept:
            prompt = self._windows[index][: -self._tokens]
            text = torch.cat([prompt, greedy(self._model, prompt, self._tokens)])
            self._kept[index] = text, likeliest(self._model, text, self._tokens, chunk_tokens=self._chunk_tokens)
        return self._kept[index]


def divergence(model: PreTrainedModel, dense: Sequence[tuple[Tensor, Tensor]], *, chunk_tokens: int) -> Divergence:
    """Of the model as it is now from what `DenseContinuations` gave; at least one."""
    firsts, shares = [], []
    for text, expected in dense:
        differs = likeliest(model, text, len(expected), chunk_tokens=chunk_tokens) != expected
        firsts.append(int(differs.long().argmax()) if bool(differs.any()) else len(expected))
        shares.append(float(differs.double().mean()))
    return Divergence(tuple(firsts), tuple(shares))


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Tensor, tokens: int) -> Tensor:
    """The likeliest tokens int64 [tokens] after a prompt int64 [T], one at a time; an end of text does not end it."""
    made, cache = prompt.to(model.device)[None], None
    for _ in range(tokens):
        new = made if cache is None else made[:, -1:]
        out = model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.get("past_key_values")
        made = torch.cat([made, out.logits[:, -1:].argmax(-1)], 1)
    return made[0, len(prompt) :].to(prompt.device)


def likeliest(model: PreTrainedModel, text: Tensor, tokens: int, *, chunk_tokens: int) -> Tensor:
    """The likeliest token int64 [tokens] at each of the last `tokens` positions of a text int64 [T], by the rows before them."""
    rows = [logits.argmax(-1) for _, logits in prefill_chunks(model, text[:-1], chunk_tokens=chunk_tokens)]
    return torch.cat(rows)[-tokens:].to(text.device)
