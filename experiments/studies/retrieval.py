"""What the model finds in prompts of several lengths, plain and by its chat template."""

from dataclasses import dataclass, field, fields, replace

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.asked import Asked
from experiments.lab import Lab
from experiments.refusals import check_count
from experiments.studies.answers import Answers, ask, means
from shadowattn.errors import InputError
from shadowattn.reporting.figures.needle_depths import draw as draw_depths
from shadowattn.reporting.figures.retrieval import draw as draw_retrieval
from shadowattn.reporting.flags import flag_lines


@dataclass(frozen=True)
class Retrieval(Answers):
    """Every one of `tasks` in prompts of `lengths` tokens, plain and (`chats`) by the model's chat template.

    The `tokens` and `chat` of the tasks' own settings are replaced; a task without them is none for this study.
    """

    lengths: list[int] = field(default_factory=lambda: [1024, 2048])
    chats: list[bool] = field(default_factory=lambda: [False])

    def __post_init__(self):
        super().__post_init__()
        if not self.lengths or not self.chats:
            raise InputError("study.lengths, study.chats: expected at least one of each")
        for name, values in (("lengths", self.lengths), ("chats", self.chats)):
            if len(set(values)) < len(values):
                raise InputError(f"study.{name}: expected each once, got {list(values)}; leave out what stands twice")
        for name, task in self.tasks.items():
            if not {"tokens", "chat"} <= {one.name for one in fields(task)}:
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
        super().check(lab)

    def asked(self, lab: Lab) -> list[Asked]:
        """Shortest prompts first."""
        made = []
        for tokens in sorted(self.lengths):
            for chat in self.chats:
                for name, task in self.tasks.items():
                    made.append(ask(name, replace(task, tokens=tokens, chat=chat), lab, tokens))
        return made

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        """Depth by length, where a task has depths, stands for the study: it shows what means over depths hide."""
        drawn = {}
        if not (at_depth := rows[rows.metric == "accuracy_at_depth"]).empty:
            drawn["needle_depths"] = draw_depths(at_depth)
        return drawn | {"study_retrieval": draw_retrieval(means(rows))}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A line a method and retention, a column a task and length; empty where dense attention answers too few."""
        flags = flag_lines(rows[rows.metric != "accuracy_at_depth"])
        rows = means(rows)
        columns = list(rows[["task", "tokens", "chat"]].drop_duplicates().itertuples(index=False, name=None))
        heads = [f"{task}\n{tokens}{' chat' if chat else ''}" for task, tokens, chat in columns]
        n = "–".join(str(count) for count in sorted({rows.n.min(), rows.n.max()}))
        table = Table("method", "retention", *heads, title=f"{title} · share answered, n = {n}")
        for (method, at), method_rows in rows.groupby(["method", "retention"], sort=False):
            shares = method_rows.set_index(["task", "tokens", "chat"]).value
            table.add_row(str(method), f"{at:g}", *(f"{shares[place]:.0%}" if place in shares.index else "" for place in columns))
        return Group(table, *flags)
