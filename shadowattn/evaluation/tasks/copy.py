"""Few-shot copying: a passage of the prompt is to be said again."""

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from shadowattn.data.retrieval import evaluation_rng, passage_to_copy
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import HAYSTACK_CUT, Haystack, Task, check_count, encode_example, opening_tokens
from shadowattn.evaluation.tasks.questions import ExactMatch

_TOKENS_OF_WORD = 6  # at most, in the mean over a passage


@dataclass(frozen=True)
class Copy(Task):
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
    cut: ClassVar[str] = HAYSTACK_CUT

    def __post_init__(self):
        check_count("documents", self.documents)
        check_count("shots", self.shots, least=0)
        if not 1 <= self.lead < self.words:
            raise InputError(f"task.lead: expected 1 to task.words − 1 = {self.words - 1} words, got {self.lead}")
        if self.tokens <= 2 * self._asking:
            raise InputError(f"task.tokens: expected more than {2 * self._asking} for {self.shots} shots, got {self.tokens}")

    @property
    def _asking(self) -> int:
        return _TOKENS_OF_WORD * self.words * (self.shots + 1)

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[ExactMatch]:
        """Prompts of about `tokens` tokens, cut from `filler` at random."""
        rng = evaluation_rng(f"task/copy/{self.seed}")
        hay = Haystack(tokenizer, filler, tokens=self.tokens, beside=self._asking + opening_tokens(tokenizer, self.chat))
        how = {"shots": self.shots, "lead": self.lead, "words": self.words}
        return [
            encode_example(tokenizer, passage_to_copy(rng, filler=hay.drawn(rng), **how), self.chat)
            for _ in range(self.documents)
        ]
