"""No questions: plain held-out text."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from shadowattn.evaluation.tasks.base import Task
from shadowattn.evaluation.tasks.questions import Question


@dataclass(frozen=True)
class Text(Task):
    """Plain held-out text: perplexity and fidelity are measured in any case, and there are no questions."""

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Question]:
        return []
