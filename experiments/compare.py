"""Several runs side by side: `python -m experiments.compare RUN RUN … [--metric NAME] [--csv FILE]`.

A RUN is a folder `results/runs/EXPERIMENT/HASH`, or EXPERIMENT/HASH. The table has a line for each method and retention, and a
column for each run, called by the settings in which they differ. Where runs differ in model, text, context or machine, or one
is simulated, it says so above.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from experiments.part_settings import declared
from experiments.progress import show
from shadowattn.errors import InputError
from shadowattn.runs import Run, load_run

# What must be the same for numbers to be about the same thing.
_SUBJECT = ("model", "corpus_sha256", "context_tokens", "n", "device", "measured")
_CALLED = {"measured": "measured, simulated or compiled", "device": "simulated device"}
_KEYS = ["method", "retention"]


def join(runs: Sequence[Run], metric: str) -> pd.DataFrame:
    """One metric of all runs: a row for each method and retention in order of appearance, a column for each run.

    Raises `InputError` where no run has the metric.
    """
    columns = []
    for name, run in zip(names(runs), runs, strict=True):
        rows = run.rows[run.rows.metric == metric]
        if rows.duplicated(_KEYS).any():
            raise InputError(f"--metric: {run.folder} has several values of {metric} for a method and retention; choose another")
        columns.append(rows.set_index(_KEYS).value.rename(name))
    if not any(len(column) for column in columns):
        metrics = sorted({str(one) for run in runs for one in run.rows.metric.unique()})
        raise InputError(f"--metric: expected one of {', '.join(metrics)}, got {metric!r}")
    return pd.concat(columns, axis=1, sort=False)


def default_metric(runs: Sequence[Run]) -> str:
    """The first metric that all runs have one value of for each method and retention; of their studies' headlines if any."""
    shared = [name for name in runs[0].rows.metric.unique() if all((run.rows.metric == name).any() for run in runs)]
    studies = [run.config["study"]["_target_"] for run in runs if "study" in run.config]
    headline = [name for study in studies for name in declared(study, "headline") or ()]
    for name in (*headline, *shared):
        if name in shared and not any(run.rows[run.rows.metric == name].duplicated(_KEYS).any() for run in runs):
            return str(name)
    raise InputError("--metric: expected runs that share a metric with one value for each method and retention; choose one")


def names(runs: Sequence[Run]) -> list[str]:
    """What tells the runs apart: the settings in which they differ, as KEY=VALUE; else their folders."""
    flat = [_flat(run.config) for run in runs]
    keys = sorted({key for settings in flat for key in settings})
    differing = [key for key in keys if len({repr(settings.get(key)) for settings in flat}) > 1]
    labels = [" ".join(f"{key}={settings[key]}" for key in differing if key in settings) for settings in flat]
    if len(set(labels)) < len(runs) or max(map(len, labels)) > 60:
        return [f"{run.folder.parent.name}/{run.folder.name}" for run in runs]
    return labels


def differences(runs: Sequence[Run], metric: str) -> list[str]:
    """In which subjects the runs' rows of a metric differ, so that their numbers are not about the same thing."""
    subjects, rows_of = [], [run.rows[run.rows.metric == metric] for run in runs]
    for column in _SUBJECT:
        values = [sorted({str(value) for value in rows[column].unique()}) for rows in rows_of if column in rows and len(rows)]
        if any(value != values[0] for value in values):
            subjects.append(_CALLED.get(column, column))
    machines = {(run.meta["machine"]["processor"], run.meta["machine"]["cores"]) for run in runs if "machine" in run.meta}
    return subjects + ["machine"] * (len(machines) > 1)


def table(joined: pd.DataFrame, title: str) -> Table:
    """For a terminal. What a run has not is a dash."""
    comparison = Table(*_KEYS, *joined.columns, title=title, title_justify="left")
    for (method, retention), values in joined.iterrows():
        cells = ["–" if pd.isna(value) else f"{value:.4g}" for value in values]
        comparison.add_row(str(method), f"{retention:g}", *cells)
    return comparison


def _flat(settings: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict):
        return {key: settings}
    return {
        name: value for part, inner in settings.items() for name, value in _flat(inner, f"{key}.{part}" if key else part).items()
    }


def _folder(run_name: str, results: Path) -> Path:
    return Path(run_name) if Path(run_name).is_dir() else results / "runs" / run_name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="folders of finished runs, or EXPERIMENT/HASH")
    parser.add_argument("--metric", help="which metric to compare (default: the first that the runs share)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where results are (default: results)")
    parser.add_argument("--csv", type=Path, help="write the table here too")
    options = parser.parse_args()
    try:
        loaded = [load_run(_folder(run_name, options.results)) for run_name in options.run]
        metric = options.metric or default_metric(loaded)
        joined = join(loaded, metric)
    except InputError as error:
        parser.exit(2, f"error: {error}\n")
    if subjects := differences(loaded, metric):
        show(f"these runs differ in {', '.join(subjects)}: their numbers are not about the same thing")
    show(table(joined, metric))
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        joined.to_csv(options.csv)
        print(options.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
