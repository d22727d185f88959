"""Key-value retrieval: one of many records is asked for again."""

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from shadowattn.data.retrieval import evaluation_rng, key_value_records
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import HAYSTACK_CUT, Haystack, Task, check_count, encode_example, opening_tokens
from shadowattn.evaluation.tasks.questions import ExactMatch

_RECORD_TOKENS = 16  # what a record takes, at most
_MOST_PAIRS = 57  # words reserved as keys for evaluation


@dataclass(frozen=True)
class RetrievalKV(Task):
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
    cut: ClassVar[str] = HAYSTACK_CUT

    def __post_init__(self):
        check_count("documents", self.documents)
        if not 1 <= self.pairs <= _MOST_PAIRS:
            raise InputError(
                f"task.pairs: expected 1 to {_MOST_PAIRS}, as many as there are keys kept for evaluation, got {self.pairs}"
            )
        if not 0 <= self.fewer < self.pairs:
            raise InputError(f"task.fewer: expected 0 to task.pairs − 1 = {self.pairs - 1} records less, got {self.fewer}")
        if self.tokens is not None and self.tokens < 2 * _RECORD_TOKENS * (self.pairs + 1):
            least = 2 * _RECORD_TOKENS * (self.pairs + 1)
            raise InputError(f"task.tokens: expected {least} or more for {self.pairs} records, got {self.tokens}")

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[ExactMatch]:
        """`filler` is used where the documents are to have some."""
        rng = evaluation_rng(f"task/retrieval_kv/{self.seed}")
        counts = [self.pairs - i % (self.fewer + 1) for i in range(self.documents)]
        if self.tokens is None:
            return [encode_example(tokenizer, key_value_records(rng, pairs=count), self.chat) for count in counts]
        hay = Haystack(
            tokenizer, filler, tokens=self.tokens, beside=_RECORD_TOKENS * (self.pairs + 1) + opening_tokens(tokenizer, self.chat)
        )
        return [
            encode_example(tokenizer, key_value_records(rng, pairs=count, filler=hay.drawn(rng)), self.chat) for count in counts
        ]
