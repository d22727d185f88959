"""What tasks of lm-evaluation-harness score with dense attention and with every method."""

import pandas as pd

from experiments.page_tables.common import REFERENCE, rows_of, table

_COMMAND = (
    "python -m experiments.run +exp=lm_eval experiment=lm_eval_smollm2 model=smollm2_q4 data=stdlib "
    "graphs.chunk_tokens=512 evaluation.context_tokens=2048 threads=1 study.include_path=bundled "
    "'study.tasks=[records_choice,wikitext_pieces]' 'retentions=[0.1,0.2]'"
)


def lm_eval_smollm2() -> str:
    """Dense, static INT8 and sparse attention on tasks that need no hub, with the harness's task versions."""
    if not (REFERENCE / "lm_eval_smollm2.csv").is_file():
        return f"Not measured yet: `{_COMMAND}`"
    return _harness_table("lm_eval_smollm2", rows_of("lm_eval_smollm2"))


def _harness_table(name: str, rows: pd.DataFrame) -> str:
    """A line a method and retention, a column a task's metric: value, and what a method changes with its 95 % interval."""
    placed = rows.set_index(["method", "retention", "task", "metric", "filter"])
    values = rows[~rows.metric.str.endswith("_change")]
    columns = values.drop_duplicates(["task", "metric", "filter"])
    lines = []
    for method, at in values[["method", "retention"]].drop_duplicates().itertuples(index=False):
        label = f"`{method}`" if at == 1 else f"`{method}`, {at:.0%} of the keys"
        lines.append([label, *(_cell(placed, (method, at, one.task, one.metric, one.filter)) for one in columns.itertuples())])
    header = ["", *(f"{one.task} v{one.version}, {one.metric}, n = {one.n}" for one in columns.itertuples())]
    return table(header, lines, name, "± the harness's standard error; change against dense with its 95 % interval, paired")


def _cell(placed: pd.DataFrame, place: tuple[str, float, str, str, str]) -> str:
    value = placed.loc[place]
    text = f"{value.value:.4g}" + ("" if value.error != value.error else f" ± {value.error:.2g}")
    changed = (*place[:3], f"{place[3]}_change", place[4])
    if changed not in placed.index:
        return text
    change = placed.loc[changed]
    return f"{text}, change {change.low:+.2f} to {change.high:+.2f}"
