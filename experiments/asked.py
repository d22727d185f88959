"""A task as a study asks it: its questions, and what a row says of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shadowattn.evaluation.tasks import Question, Task, mean_score
from shadowattn.reporting.flags import unable
from shadowattn.reporting.rows import TaskRow

R = TypeVar("R", bound=TaskRow)


@dataclass(frozen=True)
class Asked:
    """A task's questions; all else as in its rows. `depths`: of each question's hidden line, where tasks have any."""

    name: str
    tokens: int
    chat: bool
    questions: Sequence[Question]
    source: str
    cut: str
    depths: tuple[float, ...] = ()

    @classmethod
    def of(cls, name: str, task: Task, questions: Sequence[Question], tokens: int | None = None) -> "Asked":
        """`tokens`: the length that prompts were made for; None: that of the longest."""
        longest = max((question.tokens for question in questions), default=0)
        tokens = longest if tokens is None else tokens
        return cls(name, tokens, task.chat, questions, task.source, task.cut, task.question_depths)

    @property
    def key(self) -> str:
        """What its pieces of the results are called."""
        return f"{self.name}_{self.tokens}{'_chat' if self.chat else ''}"

    @property
    def metric(self) -> str:
        """The mean of its questions' scores, by name."""
        return self.questions[0].metric

    def row(self, row: R) -> R:
        """A row, as one about this task."""
        longest = max(question.tokens for question in self.questions)
        about = {"task": self.name, "source": self.source, "chat": self.chat, "cut": self.cut}
        return replace(row, tokens=self.tokens, context_tokens=longest, **about)

    def unable(self, dense: Sequence[float], *, least: float) -> str:
        """Why dense attention's scores are too low to compare methods on; empty where they are not."""
        return unable(mean_score(self.metric, dense), chance=self.questions[0].chance, least=least)
