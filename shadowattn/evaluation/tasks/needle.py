"""A needle in a haystack: one sentence hidden in held-out text."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from shadowattn import checks
from shadowattn.data.retrieval import NEEDLES, evaluation_rng, needle_in_filler
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import Haystack, Question, chat_tokens, check_count, encode_example

# What the hidden sentence and the question take of a prompt, at most.
_NEEDLE_TOKENS = {"note": 32, "number": 64}


@dataclass(frozen=True)
class Needle:
    """One sentence hidden in held-out text of `tokens` tokens at each of `depths` (0 first line, 1 last line).

    `wording`: `note`, a comment that names a word, which the bundled model was trained on; `number`, a sentence that names a
    number, which language models complete.
    """

    documents: int = 20
    tokens: int = 1024
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    seed: int = 0
    wording: str = "note"
    chat: bool = False

    def __post_init__(self):
        checks.one_of("task.wording", self.wording, tuple(NEEDLES))
        check_count("documents", self.documents)
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise InputError(f"task.depths: expected depths from 0 (first line) to 1 (last line), got {list(self.depths)}")
        least = 2 * _NEEDLE_TOKENS[self.wording]
        if self.tokens <= least:
            raise InputError(f"task.tokens: expected more than {least}, got {self.tokens}; a needle needs a haystack")

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Question]:
        """Prompts of at most `tokens` tokens, cut from `filler` at random; documents take the depths in turn."""
        rng = evaluation_rng(f"task/needle/{self.seed}")
        hay = Haystack(
            tokenizer, filler, tokens=self.tokens, beside=_NEEDLE_TOKENS[self.wording] + chat_tokens(tokenizer, self.chat)
        )
        questions = []
        for index in range(self.documents):
            drawn, depth = hay.drawn(rng), self.depths[index % len(self.depths)]
            questions.append(
                encode_example(tokenizer, needle_in_filler(rng, filler=drawn, depth=depth, wording=self.wording), self.chat)
            )
        return questions
