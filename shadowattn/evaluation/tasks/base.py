"""What every task is made of: the prompt as plain text or as a chat, and held-out text around it.

A task is a frozen dataclass that derives from `Task`; its file is named after it.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from shadowattn.data.retrieval import RetrievalExample
from shadowattn.data.text import leading_token
from shadowattn.engine.text import chat_opening
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.questions import ExactMatch, Question

# What of a prompt is cut to its length, as rows say it.
HAYSTACK_CUT = "held-out text, on both sides"

# The line itself is not quoted: a small model would go on as the quotation does, which ends there.
REPEAT_A_LINE = "Repeat a line of the text above, word for word."


class Task(ABC):
    """Questions of one kind. Settings are the fields of the class, `chat` among them where the model's template can ask."""

    cut: ClassVar[str] = "none"  # what of a prompt is cut to its length
    wording = ""  # which of several ones asks, where a task has more than one
    chat = False
    seed = 0

    @abstractmethod
    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> Sequence[Question]:
        """All of them; `filler` is held-out text. Raises `InputError` on settings, files or texts that do not fit."""

    @property
    def name(self) -> str:
        """What rows call it: its file, and its wording where it has several."""
        return "_".join(filter(None, (type(self).__module__.rpartition(".")[2], self.wording)))

    @property
    def question_depths(self) -> tuple[float, ...]:
        """Where each question's line is hidden, 0 the first line; empty for tasks that hide none."""
        return ()

    @property
    def source(self) -> str:
        """Where the questions are from, as rows say it."""
        return f"generated, seed {self.seed}"


class Haystack:
    """Pieces of held-out text, so long that with the `beside` tokens of all else a prompt has `tokens`.

    A piece is cut from the text on both sides; nothing else of a prompt is ever cut.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, filler: str, *, tokens: int, beside: int):
        self._tokenizer, self._ids = tokenizer, _ids(tokenizer, filler)
        self._length = tokens - beside
        if not 0 < self._length <= len(self._ids):
            raise InputError(
                f"task.tokens: expected more than {beside} and at most the {len(self._ids)} tokens of the held-out text beside "
                f"them, got {tokens}; set task.tokens between the two, or use a longer text"
            )

    def drawn(self, rng: random.Random) -> str:
        """A piece from a random place."""
        start = rng.randrange(len(self._ids) - self._length + 1)
        return self._tokenizer.decode(self._ids[start : start + self._length])


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, *, plain: bool = True) -> ExactMatch:
    """A question of two texts. A `plain` prompt begins with the tokenizer's beginning token where it puts one and the text does
    not spell it; any other special token is one that the texts spell. Raises `InputError` on a doubled BOS.
    """
    ids, start = _ids(tokenizer, prompt), tokenizer.bos_token_id
    ids = (leading_token(tokenizer) if plain and ids[:1] != [start] else []) + ids
    question = ExactMatch(*(torch.tensor(one, dtype=torch.int64) for one in (ids, _ids(tokenizer, answer))))
    if start is not None and ids[:2] == [start, start]:
        raise InputError(
            "task: expected at most one BOS token at the start of a prompt, got two; take the BOS token out of the text, or "
            "out of the tokenizer's chat template"
        )
    return question


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, chat: bool) -> ExactMatch:
    """A question of two texts; as a chat, the prompt's last line begins the reply to all lines before it."""
    if chat:
        message, _, line = prompt.rpartition("\n")
        prompt = chat_opening(tokenizer, message, setting="task.chat") + line
    return encode(tokenizer, prompt, answer, plain=not chat)


def ask(tokenizer: PreTrainedTokenizerBase, *, document: str, request: str, line: str, answer: str, chat: bool) -> ExactMatch:
    """`document`, `request` and the `line` that the answer continues, one below the other.

    As a chat, document and request are the user's message, and the line begins the reply.
    """
    gap = "\n\n" if chat else "\n"
    return encode_prompt(tokenizer, f"{document}{gap}{request}\n{line}", answer, chat)


def encode_example(
    tokenizer: PreTrainedTokenizerBase, example: RetrievalExample, chat: bool, request: str = REPEAT_A_LINE
) -> ExactMatch:
    """The question of a generated document; as a chat the document's last line begins the reply to `request`."""
    if not chat:
        return encode(tokenizer, example.prompt, example.answer)
    document, _, line = example.prompt.rpartition("\n")
    return ask(tokenizer, document=document, request=request, line=line, answer=example.answer, chat=True)


def opening_tokens(tokenizer: PreTrainedTokenizerBase, chat: bool, request: str = REPEAT_A_LINE) -> int:
    """What a prompt takes beside document and line: template and request of a chat, counted with a stand-in document, and of
    plain text the beginning token, where the tokenizer puts one.
    """
    if not chat:
        return len(leading_token(tokenizer))
    return len(_ids(tokenizer, chat_opening(tokenizer, f"{{document}}\n\n{request}", setting="task.chat")))


def check_count(name: str, count: int, *, least: int = 1) -> None:
    """Raises `InputError` on a setting of a task that is less than it may be."""
    if count < least:
        raise InputError(f"task.{name}: expected at least {least}, got {count}")


def check_fits(tokens: int, most: int, of: str) -> None:
    """Raises `InputError` where a prompt of the least content is longer than `task.tokens`."""
    if tokens > most:
        raise InputError(f"task.tokens: expected at least {tokens} for {of}, got {most}; use more tokens, or fewer of them")


def check_at_most(name: str, count: int, most: int, of: str) -> None:
    """Raises `InputError` where a setting of a task asks for more than there are."""
    if count > most:
        raise InputError(f"task.{name}: expected at most the {most} {of}, got {count}; use fewer")


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids
