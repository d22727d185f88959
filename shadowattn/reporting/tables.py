"""The summary table of a study: method × retention."""

import math

import pandas as pd
from rich.table import Table

_COLUMNS = {
    "perplexity": "perplexity",
    "accuracy": "task accuracy",
    "accuracy_change": "change of accuracy",
    "kl_divergence": "KL from dense, nat",
    "first_divergent_token": "tokens before the first divergent",
    "divergent_tokens": "divergent tokens",
    "mass_recall": "attention mass recall",
    "topk_overlap": "top-k overlap",
    "row_overlap": "overlap with each row's own top-k",
    "output_error": "output error",
    "density": "density",
}

# Columns of the table only where a study measured them.
_WHERE_MEASURED = ("accuracy", "accuracy_change", "kl_divergence", "first_divergent_token", "divergent_tokens", "row_overlap")


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """One line for each method and retention, with the metrics as columns, method by method in order of appearance."""
    wide = rows.pivot_table(index=["method", "retention"], columns="metric", values="value", sort=False)
    flags = rows[rows.metric == "perplexity"].set_index(["method", "retention"])["flag"]
    columns = [name for name in _COLUMNS if name not in _WHERE_MEASURED or name in wide]
    return wide.reindex(columns=columns).join(flags).reset_index()


def summary_table(rows: pd.DataFrame, title: str) -> Table:
    """The summary for a terminal. What was not measured is a dash."""
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    table.add_column("retention", justify="right")
    lines = summary(rows)
    shown, intervals = [name for name in _COLUMNS if name in lines], _intervals(rows)
    for name in shown:
        table.add_column(_COLUMNS[name], justify="right")
    table.add_column("flag")
    for line in lines.to_dict("records"):
        place = line["method"], line["retention"]
        cells = ["–" if math.isnan(line[name]) else f"{line[name]:.3f}" + intervals.get((name, *place), "") for name in shown]
        table.add_row(line["method"], f"{line['retention']:g}", *cells, line["flag"])
    return table


def _intervals(rows: pd.DataFrame) -> dict[tuple[str, str, float], str]:
    """What follows a value, by metric, method and retention: its 95 % interval and n, where the rows have the ends."""
    found = {}
    for name in ("accuracy", "accuracy_change", "perplexity"):
        ends = rows[rows.metric.isin((f"{name}_low", f"{name}_high"))]
        if not ends.empty:
            wide = ends.pivot_table(index=["method", "retention", "n"], columns="metric", values="value")
            for (method, at, n), line in wide.iterrows():
                low, high = line[f"{name}_low"], line[f"{name}_high"]
                found[name, method, at] = f" ({low:.2f} … {high:.2f}, n = {n})"
    return found
