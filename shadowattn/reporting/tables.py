"""The summary table of a study: method × retention."""

import math

import pandas as pd
from rich.table import Table

_COLUMNS = {
    "perplexity": "perplexity",
    "accuracy": "task accuracy",
    "kl_divergence": "KL from dense, nat",
    "mass_recall": "attention mass recall",
    "topk_overlap": "top-k overlap",
    "output_error": "output error",
    "density": "density",
}

# Columns of the table only where a study measured them.
_WHERE_MEASURED = ("accuracy", "kl_divergence")


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
    shown = [name for name in _COLUMNS if name in lines]
    for name in shown:
        table.add_column(_COLUMNS[name], justify="right")
    table.add_column("flag")
    for line in lines.to_dict("records"):
        values = [line[name] for name in shown]
        cells = ["–" if math.isnan(value) else f"{value:.3f}" for value in values]
        table.add_row(line["method"], f"{line['retention']:g}", *cells, line["flag"])
    return table
