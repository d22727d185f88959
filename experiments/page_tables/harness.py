"""What tasks of lm-evaluation-harness score with dense attention and with every method."""

import pandas as pd

from experiments.page_tables.common import flag_marks, rows_of, table

_CHANGE = "_change"


def lm_eval_smollm2() -> str:
    """Dense, static INT8 and sparse attention on tasks that need no hub, with the harness's task versions."""
    return _harness_table("lm_eval_smollm2", rows_of("lm_eval_smollm2"))


def _harness_table(name: str, rows: pd.DataFrame) -> str:
    """A line a method and retention, a column a task's metric: value, and what a method changes with its 95 % interval."""
    placed = rows.set_index(["method", "retention", "task", "metric", "filter"])
    marks, legend = flag_marks(placed.flag[rows.metric.str.endswith(_CHANGE).to_numpy()])
    values = rows[~rows.metric.str.endswith(_CHANGE)]
    columns = values.drop_duplicates(["task", "metric", "filter"])
    lines = []
    for method, at in values[["method", "retention"]].drop_duplicates().itertuples(index=False):
        label = f"`{method}`" if at == 1 else f"`{method}`, {at:.0%} of the keys"
        lines.append(
            [label, *(_cell(placed, marks, (method, at, one.task, one.metric, one.filter)) for one in columns.itertuples())]
        )
    header = ["", *(f"{one.task} v{one.version}, {one.metric}, n = {one.n}" for one in columns.itertuples())]
    note = f"± the harness's standard error; change against dense with its 95 % interval, paired{legend}"
    return table(header, lines, name, note)


def _cell(placed: pd.DataFrame, marks: dict[tuple, str], place: tuple[str, float, str, str, str]) -> str:
    value = placed.loc[place]
    text = f"{value.value:.4g}" + ("" if value.error != value.error else f" ± {value.error:.2g}")
    changed = (*place[:3], f"{place[3]}{_CHANGE}", place[4])
    if changed not in placed.index:
        return text
    change = placed.loc[changed]
    return f"{text}, change {change.low:+.2f} to {change.high:+.2f}{marks[changed]}"
