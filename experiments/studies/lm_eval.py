"""Tasks of lm-evaluation-harness, with dense attention and with every method, in one table."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from rich.console import Group
from rich.table import Table
from transformers import PreTrainedModel

from experiments.cells import Attachment, FullAttachment, attachment, full_row, method_row
from experiments.harness_results import HarnessRow, local_files, task_result, task_rows
from experiments.lab import Lab
from experiments.part_building import part_name
from experiments.progress import bar, say
from experiments.studies.base import Study
from experiments.studies.quality import cell_key
from shadowattn.artifacts import sha256
from shadowattn.errors import InputError
from shadowattn.online.attention import Counters
from shadowattn.reporting.flags import UNUSED, flag_lines

_BUNDLED = Path(__file__).parents[1] / "lm_eval_tasks"
_INSTALL = 'pip install "shadowattn[lm-eval]"'


@dataclass(frozen=True)
class LmEval(Study):
    """The harness's `tasks` by name; those of a folder of one's own with `include_path`, or with `bundled` in its place those of
    `experiments/lm_eval_tasks`.

    `limit` questions of each, all where it is null; `shots` examples in the prompt, null for the task's own number; `chat`: by
    the model's chat template. A prompt beyond the model's context is cut from the left, which its rows say, or with
    `allow_cut=false` refused.
    """

    tasks: list[str] = field(default_factory=list)
    include_path: str | None = None
    limit: int | None = None
    shots: int | None = None
    chat: bool = False
    allow_cut: bool = True
    on_gpu: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "retention", "retentions", "method", "compare", "full", "estimator"),
        *("allocator", "selection", "importance", "sensitivity", "calibration", "key_offset", "grid", "graphs", "device"),
        *("kernel", "dense_above", "decode", "pipeline", "scheduler"),
    )
    headline: ClassVar[tuple[str, ...]] = ("acc", "acc_norm", "exact_match", "word_perplexity", "bits_per_byte")

    def __post_init__(self):
        if not self.tasks:
            raise InputError("tasks: expected the names of tasks, got none; python -m lm_eval ls tasks lists them")
        for name in ("limit", "shots"):
            value = getattr(self, name)
            if value is not None and value < (name == "limit"):
                raise InputError(f"study.{name}: expected a count, or null, got {value}")
        if self._folder is not None and not self._folder.is_dir():
            raise InputError(f"study.include_path: expected a folder of task YAMLs, got {self.include_path}")

    def inputs(self) -> dict[str, Any]:
        """The content of one's own tasks, and of the local files that tasks read their questions from."""
        read = {
            name: [sha256(path) for path in local_files([task.config.dataset_path, task.config.dataset_kwargs])]
            for name, task in self._loaded.items()
        }
        if self._folder is None:
            return {"data": read}
        own = [path for path in sorted(self._folder.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
        return {"own_tasks": {str(path.relative_to(self._folder)): sha256(path) for path in own}, "data": read}

    def check(self, lab: Lab) -> None:
        try:
            import lm_eval  # noqa: F401 - several seconds, and only this study needs it
        except ImportError as error:
            raise InputError(f"lm_eval: expected lm-evaluation-harness to be installed ({error}); {_INSTALL}") from error
        for name, method in lab.methods.items():
            if needed := method.needs & {"bank", "nncf_graph"}:
                raise InputError(
                    f"{name}: {part_name(method.estimator)} runs graphs of fixed lengths ({', '.join(sorted(needed))}), and the "
                    "harness's prompts have any; use estimator=int8_fused, which ranks the same keys"
                )
        if self.chat and lab.loaded.tokenizer.chat_template is None:
            raise InputError("study.chat: expected a model with a chat template, got one without; use study.chat=false")
        task_names = set(self._manager.all_tasks)
        if missing := sorted(name for name in self.tasks if name not in task_names):
            raise InputError(
                f"tasks: {', '.join(missing)}: the harness has no such task; python -m lm_eval ls tasks lists all, and "
                "study.include_path=FOLDER adds those of a folder"
            )
        try:
            self._loaded  # noqa: B018 - reads their data
        except (OSError, ValueError) as error:
            raise InputError(
                f"tasks: their data could not be read ({type(error).__name__}: {error}); with no model hub, use tasks of "
                "local files: study.include_path=FOLDER"
            ) from error

    def measure(self, lab: Lab) -> list[HarnessRow]:
        """Rows of every method, dense attention first; finished ones are not measured again."""
        units = lab.units("answers")
        dense_row = replace(lab.row(HarnessRow), chat=self.chat, context_tokens=lab.shape.context_tokens)
        cells: list[tuple[HarnessRow, str, Attachment | FullAttachment | None]] = [(dense_row, "dense", None)]
        for name, full in lab.full.items():
            row = full_row(lab, dense_row, name)
            cells.append((row, name, FullAttachment(full, lab.offline.attention_ranges(full.key_offset))))
        for at in lab.retentions:
            for name, method in lab.methods.items():
                row = method_row(lab, dense_row, method, at)
                cells.append((row, cell_key(name, at), attachment(lab, method, lab.offline.profile(method.allocator, at))))
        say(f"lm_eval: {', '.join(self.tasks)} with dense attention and {len(cells) - 1} methods")
        rows: list[HarnessRow] = []
        dense = None
        for row, key, attached in bar(cells, "methods"):
            found = units.get(key, lambda attached=attached: self._evaluate(lab, attached))
            results = found["tasks"]
            dense = results if dense is None else dense
            unused = row.retention < 1 and not found["sparse_rows"]
            rows += task_rows(replace(row, flag=UNUSED if unused else ""), results, dense)
        return rows

    def _evaluate(self, lab: Lab, attached: Attachment | FullAttachment | None) -> dict[str, Any]:
        """What the harness says of one method: of every task its version, shots, metrics, their values by question, and more; and
        how many (head, row) pairs had lists."""
        from lm_eval import simple_evaluate

        from shadowattn.evaluation.harness import ShadowAttnLM

        def attach(_: PreTrainedModel) -> AbstractContextManager:
            return attached.attached(lab, ())

        model = ShadowAttnLM(
            lab.loaded.model, tokenizer=lab.loaded.tokenizer, max_length=lab.shape.context_tokens,
            method=None if attached is None else attach, allow_cut=self.allow_cut,
        )  # fmt: skip
        results = simple_evaluate(
            model, tasks=list(self.tasks), task_manager=self._manager, num_fewshot=self.shots, limit=self.limit,
            apply_chat_template=self.chat, random_seed=lab.seed, numpy_random_seed=lab.seed, torch_random_seed=lab.seed,
            fewshot_random_seed=lab.seed,
        )  # fmt: skip
        if attached is not None:
            self._check_ran(attached, lab, model.counters)
        found = [task for task in results["results"] if task in results["n-samples"]]
        return {
            "tasks": {task: task_result(self._loaded[task], task, results, model) for task in found},
            "sparse_rows": model.counters.sparse_rows,
        }

    def _check_ran(self, attached: Attachment | FullAttachment, lab: Lab, counters: Counters) -> None:
        attached.check(lab, counters)

    @cached_property
    def _loaded(self) -> dict[str, Any]:
        """The harness's tasks by name, those of groups too."""
        return self._manager.load(list(self.tasks))["tasks"]

    @cached_property
    def _manager(self):
        """The harness's index of tasks: of the folder alone where it has all that are asked for, since the whole is thousands of
        files. Groups and tags take the whole: their tasks may be the harness's.
        """
        from lm_eval.tasks import TaskManager

        folder = self._folder and str(self._folder)
        if folder:
            own = TaskManager(include_path=folder, include_defaults=False)
            if set(self.tasks) <= set(own.all_subtasks):
                return own
        return TaskManager(include_path=folder)

    @property
    def _folder(self) -> Path | None:
        """Of further tasks."""
        if self.include_path == "bundled":
            return _BUNDLED
        return None if self.include_path is None else Path(self.include_path).expanduser()

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A line a method and retention, a column a task's metric: value ± standard error, and the change against dense."""
        values = rows[~rows.metric.str.endswith("_change")]
        columns = list(values[["task", "metric", "filter"]].drop_duplicates().itertuples(index=False, name=None))
        cells = rows.set_index(["method", "retention", "task", "metric", "filter"])
        heads = [
            f"{task} v{values[values.task == task].version.iloc[0]}\n{metric} ({name})" if name != "none"
            else f"{task} v{values[values.task == task].version.iloc[0]}\n{metric}"
            for task, metric, name in columns
        ]  # fmt: skip
        n = "–".join(str(count) for count in sorted({rows.n.min(), rows.n.max()}))
        table = Table(
            "method", "retention", *heads,
            title=f"{title} · n = {n} questions a task · value ± standard error (change against dense, paired)",
            title_justify="left",
        )  # fmt: skip
        for method, at in rows[["method", "retention"]].drop_duplicates().itertuples(index=False):
            table.add_row(method, f"{at:g}", *(_shown(cells, (method, at, *column)) for column in columns))
        return Group(table, *flag_lines(rows))


def _shown(cells: pd.DataFrame, place: tuple) -> str:
    method, at, task, metric, name = place
    if place not in cells.index:
        return ""
    cell = cells.loc[place]
    shown = f"{cell.value:.4g}" + ("" if math.isnan(cell.error) else f" ± {cell.error:.2g}")
    change = (method, at, task, f"{metric}_change", name)
    if change in cells.index:
        shown += f" ({cells.loc[change].value:+.3g} ± {cells.loc[change].error:.2g})"
    return shown
