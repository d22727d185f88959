"""Tasks asked of dense attention first, then, where that answers enough, of every method: accuracy, and what a method changes."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from experiments.asked import Asked
from experiments.cells import Attachment, FullAttachment, attachment, full_row, method_row
from experiments.lab import Lab
from experiments.progress import bar, say
from experiments.studies.base import Study
from experiments.studies.quality import cell_key
from shadowattn.errors import InputError
from shadowattn.evaluation.comparison import holm, sign_flip_p
from shadowattn.evaluation.tasks import Task, mean_change, mean_score, scores
from shadowattn.reporting.flags import LEAST_SCORE, NOT_CLAIMED, UNUSED, density_flag, difference_flags
from shadowattn.reporting.rows import TaskRow
from shadowattn.reporting.style import ALL_KEYS


@dataclass(frozen=True)
class AnswerRow(TaskRow):
    """The mean score of a task's questions, and the ends `low` and `high` of its 95 % interval.

    `METRIC_change` is the mean over the same questions of what a method changes against dense attention, `METRIC_change_p` the
    p-value of no change, Holm-corrected over all methods, retentions and tasks of the study; `density` the share of
    the visible keys that the prompts' rows attended to, which has no interval. The metric `accuracy_at_depth` is of those
    questions alone whose line is hidden at `depth`, 0 the first line. `task` is the study's name for it.
    """

    low: float = 0.0
    high: float = 0.0
    depth: float | None = None


@dataclass(frozen=True)
class _Cell:
    """One method at one retention: what its pieces of the results are called, its row, and how it is attached to the model."""

    key: str
    row: AnswerRow
    attached: Callable[[], Attachment | FullAttachment]


@dataclass(frozen=True)
class Answers(Study):
    """Every one of `tasks`, by name, with dense attention, and with the methods where dense can do it.

    It can where the lower end of its interval is at least `least`, and above chance. What the model cannot do says nothing about
    a method: such rows are flagged, and no difference is claimed.
    """

    least: float = 0.25
    tasks: dict[str, Any] = field(default_factory=dict)
    on_gpu: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "retention", "retentions", "method", "compare", "full", "estimator"),
        *("allocator", "selection", "importance", "sensitivity", "calibration", "key_offset", "grid", "graphs", "device"),
        *("kernel", "dense_above", "decode", "pipeline", "scheduler"),
    )
    headline: ClassVar[tuple[str, ...]] = ("accuracy", "rouge_l")

    def __post_init__(self):
        if not 0 <= self.least <= 1:
            raise InputError(f"study.least: expected a share from 0 to 1, got {self.least}")
        if not self.tasks:
            raise InputError("study.tasks: expected at least one task, got none; add one with +task@study.tasks.NAME=needle")
        for name, task in self.tasks.items():
            if not isinstance(task, Task):
                raise InputError(f"study.tasks.{name}: expected a task, got {type(task).__name__}; see conf/task")

    @abstractmethod
    def asked(self, lab: Lab) -> list[Asked]:
        """All tasks with their questions."""

    def check(self, lab: Lab) -> None:
        longest, tasks = lab.shape.context_tokens, self.asked(lab)
        lab.asked_tokens = [question.tokens for task in tasks for question in task.questions]
        for task in tasks:
            if not task.questions:
                raise InputError(f"study.tasks.{task.name}: expected a task with questions, got plain text; leave it out")
            if task.tokens > longest:
                raise InputError(
                    f"study.tasks.{task.name}: expected prompts of at most the model's context of {longest} tokens, got "
                    f"{task.tokens} with the answer; make them shorter, where the task has such a setting by "
                    f"study.tasks.{task.name}.tokens"
                )

    def measure(self, lab: Lab) -> list[AnswerRow]:
        """Rows of every task; finished pieces are not measured again. Raises `ShardDoneError` where pieces are left to other
        shards."""
        units, tasks = lab.units("answers"), self.asked(lab)
        say(f"tasks: {len(tasks)}, with {sum(len(task.questions) for task in tasks)} questions, dense attention first")
        dense = {}
        for task in tasks:
            found = units.get(f"{task.key}_dense", lambda task=task: self._answers(lab, task, None))
            dense[task.key] = found["scores"]
        flags = {task.key: self._cannot(task, dense[task.key]) for task in tasks}
        able = [task for task in tasks if not flags[task.key]]
        rows, changes = [], []
        for task in tasks:
            row = replace(lab.row(AnswerRow), flag=flags[task.key] or self._not_claimed(task, dense[task.key]))
            rows += [_row(row, task, dense[task.key]), *_depth_rows(row, task, dense[task.key])]
        say(f"tasks: {len(able)} of {len(tasks)} answered often enough to compare methods on")
        cells = self._cells(lab) if able else []
        pieces = {
            f"{task.key}_{cell.key}": lambda cell=cell, task=task: self._answers(lab, task, cell.attached())
            for cell in cells
            for task in able
        }
        lab.measure_pieces(units, pieces, "methods")
        for cell in cells:
            for task in able:
                found = units.read(f"{task.key}_{cell.key}")
                answers = found["scores"]
                unused = cell.row.retention < 1 and not found["sparse_rows"]
                said = (UNUSED if unused else "", self._not_claimed(task, dense[task.key]))
                row = replace(cell.row, flag="; ".join(filter(None, said)))
                rows += [_row(row, task, answers), *_depth_rows(row, task, answers)]
                if len(answers) > 1:  # one question has no interval
                    changes.append((row, task, answers, dense[task.key]))
                density = replace(task.row(row), metric="density", value=found["density"], n=len(answers))
                if cell.row.allocator != ALL_KEYS:
                    main = units.read(f"{task.key}_{cell_key(lab.main.name, cell.row.retention)}")
                    if uneven := density_flag(found["density"], main["density"]):
                        density = replace(density, flag="; ".join(filter(None, (row.flag, f"{uneven} against {lab.main.name}"))))
                rows.append(replace(density, low=math.nan, high=math.nan))
        return rows + _change_rows(changes)

    def _cells(self, lab: Lab) -> list[_Cell]:
        """Those of full attention first, then retention by retention."""
        cells = []
        for name, full in lab.full.items():

            def attached_full(full=full) -> FullAttachment:
                return FullAttachment(full, lab.offline.attention_ranges(full.key_offset))

            cells.append(_Cell(name, full_row(lab, lab.row(AnswerRow), name), cache(attached_full)))
        for at in lab.retentions:
            for name, method in lab.methods.items():

                def attached(method=method, at=at) -> Attachment:
                    return attachment(lab, method, lab.offline.profile(method.allocator, at))

                cells.append(_Cell(cell_key(name, at), method_row(lab, lab.row(AnswerRow), method, at), cache(attached)))
        return cells

    def _cannot(self, task: Asked, found: Sequence[float]) -> str:
        """Why methods are not asked; empty where they are."""
        reason = task.unable(found, least=self.least)
        return f"{reason}: no method is asked" if reason else ""

    def _not_claimed(self, task: Asked, found: Sequence[float]) -> str:
        """Why methods that are asked all the same, as `least` allows, are not told apart; empty where they are."""
        reason = task.unable(found, least=LEAST_SCORE)
        return f"{reason}: {NOT_CLAIMED}" if reason else ""

    def _answers(self, lab: Lab, task: Asked, attached: Attachment | FullAttachment | None) -> dict[str, Any]:
        """The scores of all questions, the share of the visible keys that the prompts' rows attended to, and how many (head, row)
        pairs had lists."""
        model, how = lab.loaded.model, {"chunk_tokens": lab.of("graphs").chunk_tokens}
        if attached is None:
            return {"scores": scores(model, task.questions, **how, progress=lambda questions: bar(questions, task.key))}
        with attached.attached(lab, ()) as run:
            found = scores(model, task.questions, **how)
        attached.check(lab, run.counters)
        return {"scores": found, "density": run.counters.density, "sparse_rows": run.counters.sparse_rows}


def ask(name: str, task: Task, lab: Lab, tokens: int | None = None) -> Asked:
    """One of a study's tasks, for prompts of `tokens`. Raises `InputError`, which names the task as the study's settings do."""
    try:
        questions = task.questions(lab.loaded.tokenizer, lab.corpus.heldout)
    except InputError as error:
        raise InputError(f"study.tasks.{name}{str(error).removeprefix('task')}") from error
    return Asked.of(name, task, questions, tokens)


def means(rows: pd.DataFrame) -> pd.DataFrame:
    """Those about all questions of a task, and no difference."""
    return rows[rows.metric.isin(Answers.headline)]


def _row(row: AnswerRow, task: Asked, found: Sequence[float]) -> AnswerRow:
    mean = mean_score(task.metric, found)
    return replace(task.row(row), metric=task.metric, value=mean.value, low=mean.low, high=mean.high, n=mean.n)


def _depth_rows(row: AnswerRow, task: Asked, found: Sequence[float]) -> list[AnswerRow]:
    """What is answered at each depth, of tasks that have any."""
    rows = []
    for depth in sorted(set(task.depths)):
        at_depth = [score for score, other in zip(found, task.depths, strict=True) if other == depth]
        rows.append(replace(_row(row, task, at_depth), metric="accuracy_at_depth", depth=depth))
    return rows


def _change_rows(changes: Sequence[tuple[AnswerRow, Asked, Sequence[float], Sequence[float]]]) -> list[AnswerRow]:
    """What each method changes of each task, question by question, by (row, task, its scores, dense attention's); and the p-value
    of a sign-flip test, Holm-corrected over all of them, which says whether a difference can be shown."""
    rows = []
    corrected = holm([sign_flip_p(np.subtract(found, dense)) for _, _, found, dense in changes])
    for (row, task, found, dense), p in zip(changes, corrected, strict=True):
        change = mean_change(task.metric, found, dense)
        differences = [] if NOT_CLAIMED in row.flag else difference_flags(change.value, change.low, change.high, p)
        flags = "; ".join(filter(None, (row.flag, *differences)))
        changed = replace(_row(row, task, found), value=change.value, low=change.low, high=change.high, flag=flags)
        rows.append(replace(changed, metric=f"{changed.metric}_change"))
        rows.append(replace(changed, metric=f"{changed.metric}_change_p", value=p, low=math.nan, high=math.nan, flag=""))
    return rows
