"""Retrieval tasks: the answer stands somewhere in the prompt, and only a model that still attends there can say it.

Prompts come from seeds and words that training of the bundled model never used (`data.retrieval`). They end with a line to go on
with; as a `chat` the document stands in the user's message, which asks for one of its lines again, and the line begins the reply.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowattn import checks
from shadowattn.data.retrieval import (
    NEEDLES,
    RetrievalExample,
    evaluation_rng,
    key_value_records,
    needle_in_filler,
    passage_to_copy,
)
from shadowattn.engine.prefill import prefill_chunks
from shadowattn.errors import InputError

# What the hidden sentence and the question take of a needle prompt, at most; what a record takes.
_NEEDLE_TOKENS, _RECORD_TOKENS = {"note": 32, "number": 64}, 16
_TOKENS_OF_WORD = 6  # at most, in the mean over a passage
_MOST_PAIRS = 57  # words reserved as keys for evaluation
# The line itself is not quoted: a small model would go on as the quotation does, which ends there.
_ASKED = "{document}\n\nRepeat a line of the text above, word for word."


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
    in its block of rows, and a selection shared by a block would be judged by that one place. With `tokens`, the records are
    lines of held-out text, and the prompt has about so many tokens.
    """

    documents: int = 50
    pairs: int = 40
    seed: int = 0
    fewer: int = 0
    tokens: int | None = None
    chat: bool = False

    def __post_init__(self):
        _check_count("documents", self.documents)
        if not 0 <= self.fewer < self.pairs:
            raise InputError(f"task.fewer: expected 0 to task.pairs − 1 = {self.pairs - 1} records less, got {self.fewer}")
        if not 1 <= self.pairs <= _MOST_PAIRS:
            raise InputError(
                f"task.pairs: expected 1 to {_MOST_PAIRS}, as many as there are keys kept for evaluation, got {self.pairs}"
            )
        if self.tokens is not None and self.tokens < 2 * _RECORD_TOKENS * (self.pairs + 1):
            least = 2 * _RECORD_TOKENS * (self.pairs + 1)
            raise InputError(f"task.tokens: expected {least} or more for {self.pairs} records, got {self.tokens}")

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Question]:
        """`filler` is used where the documents are to have some."""
        rng = evaluation_rng(f"task/retrieval_kv/{self.seed}")
        counts = [self.pairs - i % (self.fewer + 1) for i in range(self.documents)]
        if self.tokens is None:
            return [_encoded(tokenizer, key_value_records(rng, pairs=count), self.chat) for count in counts]
        hay = _Hay(tokenizer, filler, self.tokens, _RECORD_TOKENS * (self.pairs + 1), self.chat)
        return [_encoded(tokenizer, key_value_records(rng, pairs=count, filler=hay.drawn(rng)), self.chat) for count in counts]


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
        _check_count("documents", self.documents)
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise InputError(f"task.depths: expected depths from 0 (first line) to 1 (last line), got {list(self.depths)}")
        least = 2 * _NEEDLE_TOKENS[self.wording]
        if self.tokens <= least:
            raise InputError(f"task.tokens: expected more than {least}, got {self.tokens}; a needle needs a haystack")

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Question]:
        """Prompts of at most `tokens` tokens, cut from `filler` at random; documents take the depths in turn."""
        rng = evaluation_rng(f"task/needle/{self.seed}")
        hay = _Hay(tokenizer, filler, self.tokens, _NEEDLE_TOKENS[self.wording], self.chat)
        questions = []
        for index in range(self.documents):
            drawn, depth = hay.drawn(rng), self.depths[index % len(self.depths)]
            questions.append(
                _encoded(tokenizer, needle_in_filler(rng, filler=drawn, depth=depth, wording=self.wording), self.chat)
            )
        return questions


@dataclass(frozen=True)
class Copy:
    """Few-shot copying: held-out text, `shots` passages of it again, then the first `lead` words of another one.

    Passages have `words` words and come from anywhere in the text of `tokens` tokens; the answer is the rest of the last one.
    """

    documents: int = 20
    tokens: int = 1024
    shots: int = 2
    lead: int = 8
    words: int = 12
    seed: int = 0
    chat: bool = False

    def __post_init__(self):
        _check_count("documents", self.documents)
        if self.shots < 0:
            raise InputError(f"task.shots: expected 0 or more, got {self.shots}")
        if not 1 <= self.lead < self.words:
            raise InputError(f"task.lead: expected 1 to task.words − 1 = {self.words - 1} words, got {self.lead}")
        if self.tokens <= 2 * self._asking:
            raise InputError(f"task.tokens: expected more than {2 * self._asking} for {self.shots} shots, got {self.tokens}")

    @property
    def _asking(self) -> int:
        return _TOKENS_OF_WORD * self.words * (self.shots + 1)

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Question]:
        """Prompts of about `tokens` tokens, cut from `filler` at random."""
        rng = evaluation_rng(f"task/copy/{self.seed}")
        hay = _Hay(tokenizer, filler, self.tokens, self._asking, self.chat)
        how = {"shots": self.shots, "lead": self.lead, "words": self.words}
        return [_encoded(tokenizer, passage_to_copy(rng, filler=hay.drawn(rng), **how), self.chat) for _ in range(self.documents)]


class _Hay:
    """Pieces of held-out text, so long that with `asking` tokens more a prompt has `tokens`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, filler: str, tokens: int, asking: int, chat: bool):
        self._tokenizer, self._ids = tokenizer, tokenizer(filler, add_special_tokens=False, verbose=False).input_ids
        self._length = tokens - asking - (_chat_tokens(tokenizer) if chat else 0)
        if not 0 < self._length <= len(self._ids):
            raise InputError(
                f"task.tokens: expected more than {tokens - self._length} and at most the {len(self._ids)} tokens of the "
                f"held-out text, got {tokens}"
            )

    def drawn(self, rng: random.Random) -> str:
        start = rng.randrange(len(self._ids) - self._length + 1)
        return self._tokenizer.decode(self._ids[start : start + self._length])


def exact_matches(
    model: PreTrainedModel,
    questions: list[Question],
    *,
    chunk_tokens: int,
    progress: Callable[[list[Question]], list[Question]] = list,
) -> list[bool]:
    """For each question, whether every answer token is the most likely one, as greedy decoding would find it."""
    return [_answered(model, question, chunk_tokens) for question in progress(questions)]


def exact_match_rate(model: PreTrainedModel, questions: list[Question], *, chunk_tokens: int) -> float:
    """The share of `exact_matches`."""
    return sum(exact_matches(model, questions, chunk_tokens=chunk_tokens)) / len(questions)


def _answered(model: PreTrainedModel, question: Question, chunk_tokens: int) -> bool:
    tokens = torch.cat([question.prompt, question.answer[:-1]])
    likeliest = torch.cat([logits.argmax(-1) for _, logits in prefill_chunks(model, tokens, chunk_tokens=chunk_tokens)])
    return likeliest[len(question.prompt) - 1 :].cpu().equal(question.answer)


def _encoded(tokenizer: PreTrainedTokenizerBase, example: RetrievalExample, chat: bool) -> Question:
    prompt = example.prompt
    if chat:
        document, _, line = prompt.rpartition("\n")
        prompt = _chat(tokenizer, _ASKED.format(document=document)) + line
    prompt, answer = (
        torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) for text in (prompt, example.answer)
    )
    return Question(prompt, answer)


def _chat(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """The beginning of the reply to a message, by the model's own template."""
    if tokenizer.chat_template is None:
        raise InputError("task.chat: expected a tokenizer with a chat template, got one without; use task.chat=false")
    return tokenizer.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False)


def _chat_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """What the template and the request take beside document and line."""
    return len(tokenizer(_chat(tokenizer, _ASKED), add_special_tokens=False, verbose=False).input_ids)


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise InputError(f"task.{name}: expected at least 1, got {count}")
