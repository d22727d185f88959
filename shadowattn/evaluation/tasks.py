"""Retrieval tasks: the answer stands somewhere in the prompt, and only a model that still attends there can say it.

Prompts come from seeds and words that training of the bundled model never used (`data.retrieval`).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowattn import checks
from shadowattn.data.retrieval import NEEDLES, evaluation_rng, key_value_records, needle_in_filler
from shadowattn.engine.prefill import prefill_chunks
from shadowattn.errors import InputError

# What the hidden sentence and the question take of a needle prompt, at most.
_NEEDLE_TOKENS = {"note": 32, "number": 64}
_MOST_PAIRS = 57  # words reserved as keys for evaluation


@dataclass(frozen=True)
class Question:
    """Token ids of a prompt and of its answer, int64 [T] each."""

    prompt: Tensor
    answer: Tensor

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Text:
    """Plain held-out text: perplexity and fidelity are measured in any case, and there are no questions."""

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Question]:
        return []


@dataclass(frozen=True)
class RetrievalKV:
    """`pairs` key–value records in random order, then one key again; the answer is its value.

    Document i has i mod (`fewer` + 1) records less: of prompts that are all as long, the last row would stand at the same place
    in its block of rows, and a selection shared by a block would be judged by that one place.
    """

    documents: int = 50
    pairs: int = 40
    seed: int = 0
    fewer: int = 0

    def __post_init__(self):
        _check_count("documents", self.documents)
        if not 0 <= self.fewer < self.pairs:
            raise InputError(f"task.fewer: expected 0 to task.pairs − 1 = {self.pairs - 1} records less, got {self.fewer}")
        if not 1 <= self.pairs <= _MOST_PAIRS:
            raise InputError(
                f"task.pairs: expected 1 to {_MOST_PAIRS}, as many as there are keys kept for evaluation, got {self.pairs}"
            )

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Question]:
        """`filler` is not used: a record document has none."""
        rng = evaluation_rng(f"task/retrieval_kv/{self.seed}")
        counts = [self.pairs - i % (self.fewer + 1) for i in range(self.documents)]
        return [_encoded(tokenizer, key_value_records(rng, pairs=count)) for count in counts]


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

    def __post_init__(self):
        checks.one_of("task.wording", self.wording, tuple(NEEDLES))
        _check_count("documents", self.documents)
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise InputError(f"task.depths: expected depths from 0 (first line) to 1 (last line), got {list(self.depths)}")
        least = 2 * _NEEDLE_TOKENS[self.wording]
        if self.tokens <= least:
            raise InputError(f"task.tokens: expected more than {least}, got {self.tokens}; a needle needs a haystack")

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Question]:
        """Prompts of at most `tokens` tokens, cut from `filler` at random; documents take the depths in turn."""
        rng = evaluation_rng(f"task/needle/{self.seed}")
        ids = tokenizer(filler, add_special_tokens=False, verbose=False).input_ids
        length = self.tokens - _NEEDLE_TOKENS[self.wording]
        if len(ids) < length:
            raise InputError(f"task.tokens: expected at most the {len(ids)} tokens of the held-out text, got {self.tokens}")
        questions = []
        for index in range(self.documents):
            start = rng.randrange(len(ids) - length + 1)
            hay = tokenizer.decode(ids[start : start + length])
            depth = self.depths[index % len(self.depths)]
            questions.append(_encoded(tokenizer, needle_in_filler(rng, filler=hay, depth=depth, wording=self.wording)))
        return questions


def exact_match_rate(model: PreTrainedModel, questions: list[Question], *, chunk_tokens: int) -> float:
    """Share of questions whose every answer token is the most likely one, as greedy decoding would find it."""
    return sum(_answered(model, question, chunk_tokens) for question in questions) / len(questions)


def _answered(model: PreTrainedModel, question: Question, chunk_tokens: int) -> bool:
    tokens = torch.cat([question.prompt, question.answer[:-1]])
    likeliest = torch.cat([logits.argmax(-1) for _, logits in prefill_chunks(model, tokens, chunk_tokens=chunk_tokens)])
    return bool((likeliest[len(question.prompt) - 1 :] == question.answer).all())


def _encoded(tokenizer: PreTrainedTokenizerBase, example) -> Question:
    prompt, answer = (
        torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        for text in (example.prompt, example.answer)
    )
    return Question(prompt, answer)


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise InputError(f"task.{name}: expected at least 1, got {count}")
