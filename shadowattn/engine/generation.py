"""One generation: the tokens one by one, and what they took."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING

from torch import Generator, Tensor

from shadowattn import checks
from shadowattn.engine.drafts import PromptLookup
from shadowattn.engine.kv_cache import KVCache
from shadowattn.engine.sampling import Sampling
from shadowattn.errors import InputError

if TYPE_CHECKING:
    from shadowattn.engine.engine import Engine


@dataclass
class Spent:
    """What a generation took so far. Seconds are of the wall, `…_cpu` those of the process, all threads together; neither counts
    what whoever takes the tokens does between two of them.

    `accepted_tokens` are drafts that were yielded: none behind a stop token. `first_token` is the time to the first token,
    prefill and all; `decoding` what came after it. `prefill` and `decode` hold the seconds of the engine's stages, by
    `engine.STAGES` and `ahead.AHEAD_STAGES`.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    first_token: float = 0.0
    first_token_cpu: float = 0.0
    decoding: float = 0.0
    decoding_cpu: float = 0.0
    prefill: dict[str, float] = field(default_factory=dict)
    decode: dict[str, float] = field(default_factory=dict)

    @property
    def cpu_seconds(self) -> float:
        return self.first_token_cpu + self.decoding_cpu

    @property
    def tokens_per_second(self) -> float:
        """Of decoding; not a number where there was one token."""
        return (self.new_tokens - 1) / self.decoding if self.new_tokens > 1 else float("nan")


@dataclass
class Generation:
    """Iterate over it once: it yields token ids as they are made. See `Engine.generate`."""

    engine: "Engine"
    prompt: Sequence[int]
    new_tokens: int
    stop: Collection[int]
    sampling: Sampling
    cache: KVCache
    drafts: PromptLookup | None
    progress: Callable[[int], None]
    spent: Spent = field(default_factory=Spent)
    _generator: Generator = field(init=False, repr=False)

    def __post_init__(self):
        checks.integer("new_tokens", self.new_tokens, least=1)
        self.engine.check_cache(self.cache)
        vocabulary = len(self.engine.decoder.embedding)
        self.prompt, self.stop = _token_ids("prompt", self.prompt), frozenset(_token_ids("stop", self.stop))
        if not all(0 <= token < vocabulary for token in self.prompt):
            raise InputError(f"prompt: expected token ids from 0 to {vocabulary - 1}, got others; use this model's own tokenizer")
        if not self.prompt:
            raise InputError("prompt: expected at least one token, got none")
        check_context(self.engine.decoder.shape.context_tokens, len(self.prompt), self.new_tokens)
        if self.drafts is not None:
            self.engine.check_drafts(self.drafts.most)
        self._generator = self.sampling.generator()

    def __iter__(self) -> Iterator[int]:
        if self.spent.prompt_tokens:
            raise InputError("generation: it was iterated over before; call engine.generate again, with the same cache to go on")
        began, cpu = time.perf_counter(), time.process_time()
        made = [self._sampled(self._prefill())]
        if self.drafts is not None:
            self.drafts.add(self.prompt)
        self.spent.first_token, self.spent.first_token_cpu = time.perf_counter() - began, time.process_time() - cpu
        held = list(self.prompt)  # what the cache is to hold before the next pass
        while True:
            for at, token in enumerate(made):
                self.spent.new_tokens += 1
                self.spent.accepted_tokens += at < len(made) - 1  # all but the last were drafts
                yield token
                ends, refused = token in self.stop or self.spent.new_tokens == self.new_tokens, len(made) - 1 - at
                if ends and not refused:
                    return
                self._check_alone(held)
                if ends:
                    self.cache.crop(len(self.cache) - refused)
                    return
            began, cpu = time.perf_counter(), time.process_time()
            held.append(made[-1])
            made = self._next(made)
            held += made[:-1]
            self.spent.decoding += time.perf_counter() - began
            self.spent.decoding_cpu += time.process_time() - cpu

    def _check_alone(self, held: list[int]) -> None:
        if self.cache.tokens != held:
            raise InputError(
                "cache: expected it as this generation left it, got one that was used meanwhile; end one generation before "
                "another goes on from its cache, or leave cache out"
            )

    def _prefill(self) -> Tensor:
        """The logits [V] behind the prompt."""
        spent, chunk_tokens = self.spent, self.engine.chunk_tokens
        spent.prompt_tokens = len(self.prompt)
        # At least one token goes through, for its logits.
        spent.reused_tokens = min(self.cache.shared_with(self.prompt), len(self.prompt) - 1)
        self.cache.crop(spent.reused_tokens)
        self.cache.reserve(len(self.prompt) + self.new_tokens - 1)  # once, instead of at each doubling
        for start in range(spent.reused_tokens, len(self.prompt), chunk_tokens):
            chunk = list(self.prompt[start : start + chunk_tokens])
            hidden = self.engine.forward(self.cache, chunk, stages=spent.prefill)
            self.progress(len(chunk))
        return self.engine.logits(hidden[-1:], stages=spent.prefill)[0]

    def _next(self, made: list[int]) -> list[int]:
        """The tokens after `made`, of which the last is not in the cache yet: one, and those that drafts foresaw."""
        drafted = []
        if self.drafts is not None:
            self.drafts.add(made)
            room = self.new_tokens - self.spent.new_tokens - 1  # behind the drafts comes one more token
            drafted = self.drafts.draft()[:room]
        hidden = self.engine.forward(self.cache, [made[-1], *drafted], decode=True, stages=self.spent.decode)
        logits, tokens = self.engine.logits(hidden, stages=self.spent.decode), []
        for row, draft in zip(logits, [*drafted, None], strict=True):
            tokens.append(self._sampled(row))  # a draw a token that stays, as without drafts
            if tokens[-1] != draft:
                break
        accepted = len(tokens) - 1
        self.spent.drafted_tokens += len(drafted)
        self.cache.crop(len(self.cache) - (len(drafted) - accepted))
        return tokens

    def _sampled(self, logits: Tensor) -> int:
        return self.sampling.next(logits, self._generator)


def _token_ids(name: str, tokens: Collection[int]) -> list[int]:
    try:
        return [index(token) for token in checks.sequence(name, tokens)]
    except TypeError:
        raise InputError(f"{name}: expected token ids in one sequence, got other than integers; of a batch take [0]") from None


def check_context(most: int, prompt_tokens: int, new_tokens: int) -> None:
    """Raises `InputError` where a context of so many tokens does not hold a prompt and what is made after it, but for the last
    token, whose keys nobody reads.
    """
    if prompt_tokens + new_tokens - 1 > most:
        raise InputError(
            f"prompt: the model's context is {most} tokens, got a prompt of {prompt_tokens} and {new_tokens} new ones; shorten "
            "the prompt or set fewer new tokens"
        )
