"""What a sweep ends in: one table and one figure over all of its jobs, whatever launched them.

Every job leaves its outcome as a file in the sweep's folder, so that the command that began it can gather those of other
processes and machines too.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments.compose import typed
from experiments.part_settings import declared
from shadowattn.artifacts import read_json, write_json
from shadowattn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_MOST_CASES = 12  # of a job, method and retention in the table

# Tells a sweep's jobs, which a launcher may run in other processes, where to leave their outcomes.
_FOLDER = "SHADOWATTN_SWEEP"

# Errors of jobs that could not report their own.
STOPPED, NOT_BEGUN = "its process ended before the job did", "never began"


class Begun(Callback):
    """The sweeps that this process began: Hydra's settings of each, by its folder."""

    sweeps: ClassVar[dict[Path, DictConfig]] = {}

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir).absolute()
        self.sweeps[folder] = config.hydra
        os.environ[_FOLDER] = str(folder)


def planned(settings: DictConfig) -> list[list[str]]:
    """The overrides of every job of a sweep, by Hydra's settings; none where another sweeper chooses jobs as it goes."""
    if not settings.sweeper._target_.endswith(BasicSweeper.__name__):
        return []
    words = [*(f"{key}={value}" for key, value in (settings.sweeper.params or {}).items()), *settings.overrides.task]
    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    return [[typed(one) for one in job] for job in jobs]


def record(job: int, outcome: dict[str, Any]) -> None:
    """Keeps what became of a job: `overrides`, the run's `folder`, and an `error`, empty where there is none."""
    write_json(Path(os.environ[_FOLDER]) / f"job_{job}.json", outcome)


def finish(folder: Path, plan: list[list[str]]) -> dict[str, str]:
    """Prints the sweep's table, writes its rows and its figure, and returns what failed: errors by jobs, named by their settings.

    `plan`: the overrides of every job; those that left no outcome never began.
    """
    jobs = {number: {"overrides": overrides, "folder": "", "error": NOT_BEGUN} for number, overrides in enumerate(plan)}
    jobs |= {int(path.stem.split("_")[1]): read_json(path, "run the sweep again") for path in folder.glob("job_*.json")}
    names = dict(zip(sorted(jobs), job_names([jobs[number]["overrides"] for number in sorted(jobs)]), strict=True))
    failed = {f"job {number} ({name})": jobs[number]["error"] for number, name in names.items() if jobs[number]["error"]}
    done = {names[number]: one for number, one in sorted(jobs.items()) if one["folder"]}
    if done:
        _show(folder, done)
    return failed


def _show(folder: Path, jobs: dict[str, dict[str, Any]]) -> None:
    import pandas as pd  # a second to import, and only a finished sweep needs it

    from experiments.progress import say, show
    from experiments.provenance import origin_line
    from shadowattn.reporting.figures.sweep import draw
    from shadowattn.reporting.style import save
    from shadowattn.runs import load_run

    parts, places, headline = [], {}, {}
    for name, one in jobs.items():
        try:
            run = load_run(one["folder"])
        except InputError as error:
            say(f"{name}: {error}")
            continue
        on = run.meta["machine"]
        parts.append(run.rows.assign(job=name))
        places[origin_line(run.rows, on, on["git_commit"], on["git_dirty"])] = None
        headline |= dict.fromkeys(declared(run.config["study"]["_target_"], "headline") or ())
    if not parts:
        return
    rows = pd.concat(parts, ignore_index=True)
    rows.to_csv(folder / "rows.csv", index=False)
    shown = metrics(rows, headline)
    show(table(rows, shown))
    print(save(draw(rows, shown[0]), folder / "sweep.png", below="; ".join(places)))
    print(folder / "rows.csv")


def job_names(overrides: list[list[str]]) -> list[str]:
    """What tells jobs apart: the overrides in which they differ."""
    shared = set.intersection(*map(set, overrides)) if len(overrides) > 1 else set()
    return [" ".join(one for one in words if one not in shared).replace("++", "") or "all" for words in overrides]


def metrics(rows: "pd.DataFrame", headline: Iterable[str]) -> list[str]:
    """The metrics of a study's `headline` that there are rows of; else the first metric of the rows."""
    measured = list(dict.fromkeys(rows.metric))
    return [name for name in headline if name in measured] or measured[:1]


def table(rows: "pd.DataFrame", shown: list[str]) -> "Table":
    """A line for each job, method and retention, and each case of the study, with the metrics as columns."""
    from rich.table import Table

    from shadowattn.reporting.cases import KEYS, cells

    case_cells = cells(rows, shown, _MOST_CASES)
    units = case_cells.values.drop_duplicates("metric").set_index("metric").unit
    heads = [name.replace("_", " ") + (f", {units[name]}" if units[name] != "1" else "") for name in shown]
    kinds = " and ".join(sorted(set(rows.measured[rows.metric.isin(shown)])))
    pooled = f" · medians over {', '.join(name.replace('_', ' ') for name in case_cells.pooled)}" if case_cells.pooled else ""
    keys = [KEYS[0], *case_cells.cases, *KEYS[1:]]
    summary = Table(*(name.replace("_", " ") for name in keys), *heads, title=f"all jobs · {kinds}{pooled}", title_justify="left")
    for key, line in case_cells.values.groupby(keys, sort=False, dropna=False):
        cells_of = {one.metric: _cell(one.value, one.low, one.high) for one in line.itertuples()}
        summary.add_row(*(_key(one) for one in key), *(cells_of.get(name, "–") for name in shown))
    return summary


def _key(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(value: float, low: float, high: float) -> str:
    """A value with its interval, where it has one."""
    if value != value:
        return "–"
    return f"{value:.4g}" if low != low else f"{value:.4g} ({low:.4g} … {high:.4g})"
