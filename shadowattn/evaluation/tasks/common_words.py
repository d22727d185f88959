"""Common words: which words of a long list occur most often."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from shadowattn.data.retrieval import WORDS, asked_words, evaluation_rng
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import Task, ask, check_count
from shadowattn.evaluation.tasks.questions import ExactMatch

# The worked example: how often its common words occur, and how many words occur once.
_EXAMPLE_OFTEN, _EXAMPLE_RARE = 3, 5
_MOST_COMMON = len(asked_words("evaluation")) // 2  # half of the words reserved for evaluation; the example takes the others
_REQUEST = "Which {count} words occur most often in the list above? Name them in alphabetical order."
_LINE = "The most common words are"


@dataclass(frozen=True)
class CommonWords(Task):
    """Common words extraction of RULER (arXiv 2404.06654, section 3, aggregation).

    A numbered list in random order holds `common` words `often` times each, and other words `rarely` times each, as many of them
    as fit: prompts have at most `tokens` tokens with the answer, and nothing is cut. The answer names the common words in
    alphabetical order, separated by commas. A worked example, a short list of other common words, comes first, as in RULER.

    Departures: RULER takes 10 common words 30 times each and any other word 3 times, from a large English vocabulary, asks for
    no order, and counts the share of words that the reply names; here all words are common nouns of our own list, common ones
    are reserved for evaluation, the counts fit prompts of 1024 tokens, and the whole list has to match.
    """

    documents: int = 20
    tokens: int = 2048
    common: int = 5
    often: int = 20
    rarely: int = 2
    seed: int = 0
    chat: bool = False

    def __post_init__(self):
        for name in ("documents", "tokens", "common", "rarely"):
            check_count(name, getattr(self, name))
        if self.common > _MOST_COMMON:
            raise InputError(
                f"task.common: expected at most {_MOST_COMMON}, half of the words kept for evaluation, got {self.common}; "
                "use fewer"
            )
        if self.often <= self.rarely:
            raise InputError(
                f"task.often: expected more than task.rarely = {self.rarely}, so that common words are common, got {self.often}"
            )

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[ExactMatch]:
        """`filler` is not used. Raises `InputError` where `tokens` are too few for a word more, or more than all words fill."""
        rng = evaluation_rng(f"task/common_words/{self.seed}")
        return [self._question(tokenizer, rng) for _ in range(self.documents)]

    def _question(self, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> ExactMatch:
        words = rng.sample(asked_words("evaluation"), 2 * self.common)
        shown, common = words[: self.common], words[self.common :]
        rare = rng.sample([word for word in WORDS if word not in words], len(WORDS) - len(words))
        example = _mixed(shown * _EXAMPLE_OFTEN + rare[:_EXAMPLE_RARE], rng)
        order = rng.random()

        def asked(count: int) -> ExactMatch:
            entries = common * self.often + rare[:count] * self.rarely
            return self._ask(tokenizer, (example, shown), (_mixed(entries, random.Random(order)), common))

        fitting = bisect_right(range(1, len(rare) + 1), self.tokens, key=lambda count: asked(count).tokens)
        if not 0 < fitting < len(rare):
            raise InputError(
                f"task.tokens: expected {asked(1).tokens} to {asked(len(rare)).tokens - 1}, which {self.common} common words and "
                f"1 to {len(rare) - 1} others fill, got {self.tokens}; for a longer prompt raise task.rarely or task.often, for "
                "a shorter one lower task.often"
            )
        return asked(fitting)

    def _ask(self, tokenizer: PreTrainedTokenizerBase, *lists: tuple[list[str], list[str]]) -> ExactMatch:
        """The last of some lists and its common words, asked for after the others with their answers."""
        *examples, (entries, common) = lists
        request = _REQUEST.format(count=self.common)
        solved = "".join(f"{_numbered(shown)}\n{request}\n{_LINE}{_answer(words)}\n\n" for shown, words in examples)
        return ask(
            tokenizer, document=solved + _numbered(entries), request=request, line=_LINE, answer=_answer(common), chat=self.chat
        )


def _mixed(entries: Sequence[str], rng: random.Random) -> list[str]:
    return rng.sample(entries, len(entries))


def _numbered(entries: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))


def _answer(words: Sequence[str]) -> str:
    return f" {', '.join(sorted(words))}"
