"""A needle in a haystack: one sentence hidden in held-out text."""

import random
from dataclasses import dataclass, field
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from shadowattn import checks
from shadowattn.data.retrieval import RetrievalExample, evaluation_rng, needle_in_filler, resident_in_filler
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import (
    HAYSTACK_CUT,
    REPEAT_A_LINE,
    Haystack,
    Task,
    check_count,
    encode_example,
    opening_tokens,
)
from shadowattn.evaluation.tasks.questions import ExactMatch

# The wording whose question shares no content word with the hidden sentence, so that no line is to be repeated.
_COUNTRY, _COMPLETE_A_SENTENCE = "country", "Complete a sentence by a name from the text above."
# What the hidden sentences and the question take of a prompt, at most.
_NEEDLE_TOKENS = {"note": 32, "number": 64, _COUNTRY: 144}


@dataclass(frozen=True)
class Needle(Task):
    """One sentence hidden in held-out text of `tokens` tokens at each of `depths` (0 first line, 1 last line).

    `wording`: `note`, a comment that names a word, which the bundled model was trained on; `number`, a sentence that names a
    number, which language models complete; `country`, a sentence on who lives in a city, asked for by the city's country, so that
    question and sentence share no content word (after NoLiMa, arXiv 2502.05167, section 3, without its sets of sentences). Three
    people in other cities are hidden too, and only knowledge of countries tells them apart.
    """

    documents: int = 20
    tokens: int = 1024
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    seed: int = 0
    wording: str = "note"
    chat: bool = False
    cut: ClassVar[str] = HAYSTACK_CUT

    def __post_init__(self):
        checks.one_of("task.wording", self.wording, tuple(_NEEDLE_TOKENS))
        check_count("documents", self.documents)
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise InputError(f"task.depths: expected depths from 0 (first line) to 1 (last line), got {list(self.depths)}")
        least = 2 * _NEEDLE_TOKENS[self.wording]
        if self.tokens <= least:
            raise InputError(f"task.tokens: expected more than {least}, got {self.tokens}; a needle needs a haystack")

    @property
    def question_depths(self) -> tuple[float, ...]:
        """The depth of each question's needle: documents take the depths in turn."""
        return tuple(self.depths[index % len(self.depths)] for index in range(self.documents))

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[ExactMatch]:
        """Prompts of at most `tokens` tokens, cut from `filler` at random."""
        rng = evaluation_rng(f"task/needle/{self.seed}")
        request = _COMPLETE_A_SENTENCE if self.wording == _COUNTRY else REPEAT_A_LINE
        beside = _NEEDLE_TOKENS[self.wording] + opening_tokens(tokenizer, self.chat, request)
        hay = Haystack(tokenizer, filler, tokens=self.tokens, beside=beside)
        examples = [self._example(rng, hay.drawn(rng), depth) for depth in self.question_depths]
        return [encode_example(tokenizer, example, self.chat, request) for example in examples]

    def _example(self, rng: random.Random, filler: str, depth: float) -> RetrievalExample:
        if self.wording == _COUNTRY:
            return resident_in_filler(rng, filler=filler, depth=depth)
        return needle_in_filler(rng, filler=filler, depth=depth, wording=self.wording)
