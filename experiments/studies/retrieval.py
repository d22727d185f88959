"""What the model finds in its prompt: with dense attention first, then, where that finds enough, with every other method."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar

import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from experiments.cells import Attachment, FullAttachment, attachment
from experiments.lab import Lab
from experiments.part_building import part_name
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from experiments.studies.quality import cell_key
from shadowattn.errors import InputError
from shadowattn.evaluation.intervals import share_interval
from shadowattn.evaluation.tasks import Question, exact_matches
from shadowattn.reporting.figures.retrieval import draw as draw_retrieval
from shadowattn.reporting.rows import Row
from shadowattn.reporting.style import ALL_KEYS


@dataclass(frozen=True)
class RetrievalRow(Row):
    """A share of questions answered, and the ends `low` and `high` of its 95 % interval; n counts questions.

    `task` is the study's name for it, such as needle or records, `tokens` the length of the prompts, `chat` whether the chat
    template asks.
    """

    task: str = ""
    tokens: int = 0
    chat: bool = False
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True)
class Task:
    """One task at one length."""

    name: str
    tokens: int
    chat: bool
    questions: list[Question]

    @property
    def key(self) -> str:
        """What its pieces of the results are called."""
        return f"{self.name}_{self.tokens}{'_chat' if self.chat else ''}"


@dataclass(frozen=True)
class Retrieval(Study):
    """Every one of `tasks`, by name, in prompts of `lengths` tokens, plain and (`chats`) by the model's chat template.

    Methods are measured only on what dense attention answers at least the share `least` of: what the model cannot do says nothing
    about a method. The `tokens` and `chat` of the tasks' own settings are replaced; a task without them is none for this study.
    """

    lengths: list[int] = field(default_factory=lambda: [1024, 2048])
    chats: list[bool] = field(default_factory=lambda: [False])
    least: float = 0.5
    tasks: dict[str, Any] = field(default_factory=dict)
    on_gpu: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "retention", "retentions", "method", "compare", "full", "estimator"),
        *("allocator", "selection", "importance", "sensitivity", "calibration", "key_offset", "grid", "graphs", "device"),
        *("kernel", "dense_above", "decode", "pipeline", "scheduler"),
    )
    headline: ClassVar[tuple[str, ...]] = ("accuracy",)

    def __post_init__(self):
        if not self.lengths or not self.chats:
            raise InputError("study.lengths, study.chats: expected at least one of each")
        if not 0 <= self.least <= 1:
            raise InputError(f"study.least: expected a share from 0 to 1, got {self.least}")
        if not self.tasks:
            raise InputError("study.tasks: expected at least one task, got none; add one with +task@study.tasks.NAME=needle")
        for name, task in self.tasks.items():
            if not is_dataclass(task) or not {"tokens", "chat"} <= {one.name for one in fields(task)}:
                raise InputError(
                    f"study.tasks.{name}: expected a task whose settings include tokens and chat, got {type(task).__name__}; use "
                    "it as task=, or take another one"
                )
        for length in self.lengths:
            check_count("study.lengths", length)
            for task in self.tasks.values():
                replace(task, tokens=length)

    def check(self, lab: Lab) -> None:
        longest = lab.shape.context_tokens
        if max(self.lengths) > longest:
            raise InputError(f"study.lengths: expected at most the model's context of {longest} tokens, got {max(self.lengths)}")
        if True in self.chats and lab.loaded.tokenizer.chat_template is None:
            raise InputError("study.chats: expected a model with a chat template, got one without; use study.chats=[false]")

    def asked(self, lab: Lab) -> list[Task]:
        """All tasks with their questions, shortest prompts first."""
        asked = []
        for tokens in sorted(self.lengths):
            for chat in self.chats:
                for name, task in self.tasks.items():
                    questions = replace(task, tokens=tokens, chat=chat).questions(lab.loaded.tokenizer, lab.corpus.heldout)
                    asked.append(Task(name, tokens, chat, questions))
        return asked

    def measure(self, lab: Lab) -> list[RetrievalRow]:
        """Rows of every task; finished pieces are not measured again."""
        units, tasks = lab.units("answers"), self.asked(lab)
        say(f"retrieval: {len(tasks)} tasks, {sum(len(task.questions) for task in tasks)} questions, dense first")
        dense = {task.key: units.get(f"{task.key}_dense", lambda task=task: self._answers(lab, task, None)) for task in tasks}
        rows = [self._row(lab.row(RetrievalRow), task, dense[task.key]) for task in tasks]
        able = [task for task in tasks if sum(dense[task.key]) >= self.least * len(task.questions)]
        say(f"retrieval: {len(able)} of {len(tasks)} tasks answered often enough to compare methods on")
        for name, full in lab.full.items() if able else ():
            attached = FullAttachment(full, lab.offline.attention_ranges(full.key_offset))
            full_row = replace(lab.row(RetrievalRow), method=name, estimator=part_name(lab.of("full")[name]), allocator=ALL_KEYS)
            rows += self._method_rows(lab, full_row, able, attached, name)
        cells = [(name, at) for at in lab.retentions for name in lab.methods] if able else []
        for name, at in bar(cells, "methods"):
            method = lab.methods[name]
            attached = attachment(lab, method, lab.offline.profile(method.allocator, at))
            method_row = replace(
                lab.row(RetrievalRow),
                method=name,
                retention=at,
                estimator=part_name(method.estimator),
                allocator=part_name(method.allocator),
                estimate_device=lab.device.label if "bank" in method.needs else "none",
                **method.selection,
                dense_above=lab.dense_above(method.selection.query_block),
            )
            rows += self._method_rows(lab, method_row, able, attached, cell_key(name, at))
        return rows

    def _method_rows(
        self, lab: Lab, row: RetrievalRow, tasks: Sequence[Task], attached: Attachment | FullAttachment, key: str
    ) -> list[RetrievalRow]:
        units = lab.units("answers")
        return [
            self._row(row, task, units.get(f"{task.key}_{key}", lambda task=task: self._answers(lab, task, attached)))
            for task in tasks
        ]

    def _answers(self, lab: Lab, task: Task, attached: Attachment | FullAttachment | None) -> list[bool]:
        model, how = lab.loaded.model, {"chunk_tokens": lab.of("graphs").chunk_tokens}
        if attached is None:
            return exact_matches(model, task.questions, **how, progress=lambda questions: bar(questions, task.key))
        with attached.attached(lab, ()) as run:
            answers = exact_matches(model, task.questions, **how)
        attached.check(lab, run.counters)
        return answers

    def _row(self, row: RetrievalRow, task: Task, answers: Sequence[bool]) -> RetrievalRow:
        share = share_interval(sum(answers), len(answers))
        placed = {"task": task.name, "tokens": task.tokens, "chat": task.chat, "context_tokens": task.tokens}
        return replace(row, metric="accuracy", value=share.value, low=share.low, high=share.high, n=share.n, **placed)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"study_retrieval": draw_retrieval(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """A line a method and retention, a column a task and length; empty where dense attention answers too few."""
        columns = list(rows[["task", "tokens", "chat"]].drop_duplicates().itertuples(index=False, name=None))
        heads = [f"{task}\n{tokens}{' chat' if chat else ''}" for task, tokens, chat in columns]
        n = "–".join(str(count) for count in sorted({rows.n.min(), rows.n.max()}))
        table = Table("method", "retention", *heads, title=f"{title} · share answered, n = {n}")
        for (method, at), method_rows in rows.groupby(["method", "retention"], sort=False):
            shares = method_rows.set_index(["task", "tokens", "chat"]).value
            table.add_row(str(method), f"{at:g}", *(f"{shares[place]:.0%}" if place in shares.index else "" for place in columns))
        return table
