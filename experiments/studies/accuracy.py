"""The paper's accuracy table (Table 6): tasks as their settings are, with dense attention and with every method."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.asked import Asked
from experiments.lab import Lab
from experiments.studies.answers import Answers, ask, means
from shadowattn.reporting.figures.accuracy import draw as draw_accuracy
from shadowattn.reporting.flags import SAME, flag_lines

_LEGEND = (
    "value, its 95 % interval, and the change against dense attention on the same questions with its interval (paired)\n"
    "= no difference from dense attention can be shown (sign-flip test, Holm-corrected over all changes of the table)\n"
    "empty: dense attention scores too little to compare methods on"
)


@dataclass(frozen=True)
class Accuracy(Answers):
    """Every one of `tasks`, with dense attention first."""

    least: float = 0.05

    def asked(self, lab: Lab) -> list[Asked]:
        return [ask(name, task, lab) for name, task in self.tasks.items()]

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"accuracy": draw_accuracy(means(rows))}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A line a method and retention, a column a task."""
        values, changes = means(rows), rows[rows.metric.str.endswith("_change")]
        columns = values.drop_duplicates("task")
        heads = [f"{one.task}\n{one.metric}, n = {one.n}, up to {one.tokens} tokens" for one in columns.itertuples()]
        table = Table("method", "retention", *heads, title=title, title_justify="left")
        for (method, at), cells in values.groupby(["method", "retention"], sort=False):
            found = cells.set_index("task")
            of_method = changes[(changes.method == method) & (changes.retention == at)].set_index("task")
            table.add_row(str(method), f"{at:g}", *(_said(task, found, of_method) for task in columns.task))
        return Group(table, _LEGEND, *flag_lines(rows, without=(SAME,)))


def _said(task: str, values: pd.DataFrame, changes: pd.DataFrame) -> str:
    if task not in values.index:
        return ""
    value = values.loc[task]
    text = f"{value.value:.3f} ({value.low:.3f} to {value.high:.3f})"
    if task not in changes.index:
        return text
    change = changes.loc[task]
    same = " =" if SAME in change.flag.split("; ") else ""
    return f"{text}\n{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f}){same}"
