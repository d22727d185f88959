"""What tasks score with dense attention and with every method."""

import pandas as pd

from experiments.page_tables.common import rows_of, table
from shadowattn.reporting.flags import NOT_CLAIMED, SAME


def accuracy_smollm2() -> str:
    """The paper's methods on the tasks that SmolLM2 can do with dense attention, and what those that it cannot score."""
    return _accuracy("study_accuracy_smollm2")


def retrieval() -> str:
    """What the bundled model finds in prompts of several lengths, dense and with each method."""
    return _retrieval("study_retrieval")


def retrieval_smollm2_chat() -> str:
    """What SmolLM2 finds in prompts of several lengths, plain and by its chat template, dense and with each method."""
    return _by_prompt("study_retrieval_smollm2_chat")


def retrieval_smollm2_chat_4096() -> str:
    """The same in longer prompts."""
    return _by_prompt("study_retrieval_smollm2_chat_4096")


def retrieval_smollm2_chat_8064() -> str:
    """The same by the chat template in prompts that fill its context, but for the answer."""
    return _by_prompt("study_retrieval_smollm2_chat_8064")


def retrieval_smollm2_8192() -> str:
    """The same in prompts that fill its context, but for the answer."""
    return _retrieval("study_retrieval_smollm2_8192")


def _retrieval(name: str) -> str:
    """A line a method and retention, a column a task and length of prompt; empty where a method was not asked."""
    rows = rows_of(name)
    rows = rows[rows.metric == "accuracy"]
    columns = list(rows[["task", "tokens", "chat"]].drop_duplicates().itertuples(index=False, name=None))
    lines = []
    for (method, at), answered in rows.groupby(["method", "retention"], sort=False):
        cells = answered.set_index(["task", "tokens", "chat"])[["value", "low", "high"]]
        said = [_share(*cells.loc[place]) if place in cells.index else "" for place in columns]
        lines.append([f"`{method}`" if at == 1 else f"`{method}`, {at:.0%} of the keys", *said])
    heads = [f"{task}{', chat template' if chat else ''}, {tokens} tokens" for task, tokens, chat in columns]
    n = " to ".join(str(count) for count in sorted({rows.n.min(), rows.n.max()}))
    return table(["questions answered", *heads], lines, name, f"n = {n} questions a cell, 95 % intervals (Wilson)")


def _by_prompt(name: str) -> str:
    """The same, a line a prompt and a column a method; = where a method's change from dense attention is not told from none."""
    rows = rows_of(name)
    scores, changes = rows[rows.metric == "accuracy"], rows[rows.metric == "accuracy_change"]
    prompt, method = ["task", "tokens", "chat"], ["method", "retention"]
    told = changes[~changes.flag.fillna("").str.contains(SAME)].set_index(prompt + method).index
    methods = list(scores[method].drop_duplicates().itertuples(index=False, name=None))
    lines = []
    for place, answered in scores.groupby(prompt, sort=False):
        cells, said = answered.set_index(method)[["value", "low", "high"]], []
        for which in methods:
            same = "" if which[0] == "dense" or (*place, *which) in told else " ="
            said.append(_share(*cells.loc[which]) + same if which in cells.index else "")
        task, tokens, chat = place
        lines.append([f"{task}, {tokens} tokens{', chat template' if chat else ''}", *said])
    heads = [f"`{one}`" if at == 1 else f"`{one}`, {at:.0%} of the keys" for one, at in methods]
    same = f"= p > 0.05 of a sign-flip test, Holm-corrected over {len(changes)} changes"
    n = f"n = {scores.n.iloc[0]} questions a cell, 95 % intervals (Wilson); {same}"
    return table(["questions answered", *heads], lines, name, n)


def _share(value: float, low: float, high: float) -> str:
    return f"{value:.0%} ({low:.0%} to {high:.0%})"


def _accuracy(name: str) -> str:
    """A line a method, a column a task that methods were asked; below it the tasks that none was asked."""
    rows = rows_of(name)
    means = rows[rows.metric.isin(["accuracy", "rouge_l"])]
    changes = rows[rows.metric.str.endswith("_change")].set_index(["method", "retention", "task"])
    dense = means[means.method == "dense"].set_index("task")
    told = changes[~changes.flag.fillna("").str.contains(NOT_CLAIMED)]
    asked = [task for task in dense.index if task in set(told.index.get_level_values("task"))]
    lines = []
    for (method, at), values in means.groupby(["method", "retention"], sort=False):
        of_task, label = values.set_index("task"), f"`{method}`" if at == 1 else f"`{method}`, {at:.0%} of the keys"
        lines.append([label, *(_said(of_task.loc[task], changes, (method, at, task)) for task in asked)])
    header = ["", *(f"{task}, n = {dense.loc[task, 'n']}" for task in asked)]
    unable = [
        f"{task} {dense.loc[task, 'value']:.2f} (n = {dense.loc[task, 'n']})"
        for task in dense.index.difference(asked, sort=False)
    ]
    corrected = int(rows.metric.str.endswith("_change_p").sum())
    same = f"p > 0.05 of a sign-flip test, Holm-corrected over {corrected} changes" if corrected else "holds zero, not corrected"
    n = f"mean score, 95 % interval of dense attention's and of what a method changes, paired; = {same}"
    below = f"\n\nDense attention cannot do these, and no difference is claimed: {', '.join(unable)}."
    return table(header, lines, name, n) + (below if unable else "")


def _said(value: pd.Series, changes: pd.DataFrame, cell: tuple[str, float, str]) -> str:
    if cell not in changes.index:
        return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})"
    change = changes.loc[cell]
    same = " =" if SAME in change.flag.split("; ") else ""
    return f"{value.value:.2f}, change {change.low:+.2f} to {change.high:+.2f}{same}"
