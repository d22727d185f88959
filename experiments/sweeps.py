"""What a sweep ends in: one table and one figure over all of its jobs, whatever launched them.

Every job leaves its outcome as a file in the sweep's folder, so that the command that began it can gather those of other
processes and machines too.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from shadowattn.artifacts import read_json, write_json
from shadowattn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

# Shown first where a study has them.
_HEADLINES = ("perplexity", "loss_increase", "accuracy", "mass_recall", "topk_overlap", "output_error", "recall", "latency")
_DRAWN = ("loss_increase", "recall")  # else the first of the table
_MOST = 6  # metrics in a table


# Tells a sweep's jobs, which a launcher may run in other processes, where to leave their outcomes.
_FOLDER = "SHADOWATTN_SWEEP"


class Begun(Callback):
    """The folders of the sweeps that this process began."""

    folders: ClassVar[list[Path]] = []

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.folders.append(Path(config.hydra.sweep.dir).absolute())
        os.environ[_FOLDER] = str(self.folders[-1])


def record(job: int, outcome: dict[str, Any]) -> None:
    """Keeps what became of a job: `overrides`, the run's `folder`, and an `error`, empty where there is none."""
    write_json(Path(os.environ[_FOLDER]) / f"job_{job}.json", outcome)


def finish(folder: Path) -> list[str]:
    """Prints the sweep's table, writes its rows and its figure, and returns the jobs that failed, each with its settings."""
    jobs = {int(path.stem.split("_")[1]): read_json(path, "run the sweep again") for path in folder.glob("job_*.json")}
    names = dict(zip(sorted(jobs), job_names([jobs[number]["overrides"] for number in sorted(jobs)]), strict=True))
    failed = [f"job {number} ({name})" for number, name in names.items() if jobs[number]["error"]]
    done = {names[number]: one for number, one in sorted(jobs.items()) if one["folder"]}
    if len(done) > 1:
        _show(folder, done)
    return failed


def _show(folder: Path, jobs: dict[str, dict[str, Any]]) -> None:
    import pandas as pd  # a second to import, and only a finished sweep needs it
    from rich.console import Console

    from experiments.provenance import measured_on
    from shadowattn.reporting.figures.sweep import draw
    from shadowattn.reporting.style import save
    from shadowattn.runs import load_run

    parts, places = [], {}
    for name, one in jobs.items():
        try:
            run = load_run(one["folder"])
            on = run.meta["machine"]
            parts.append(run.rows.assign(job=name))
            places[measured_on(on, on["git_commit"], on["git_dirty"])] = None
        except InputError as error:
            Console(stderr=True).print(f"{name}: {error}", markup=False)
    rows = pd.concat(parts, ignore_index=True)
    rows.to_csv(folder / "rows.csv", index=False)
    found = metrics(rows)
    if not found:
        return
    Console(width=160, soft_wrap=True).print(table(rows, found))
    drawn = next((name for name in _DRAWN if name in found), found[0])
    print(save(draw(rows, drawn), folder / "sweep.png", below="; ".join(places)))
    print(folder / "rows.csv")


def job_names(overrides: list[list[str]]) -> list[str]:
    """What tells jobs apart: the overrides in which they differ."""
    shared = set.intersection(*map(set, overrides)) if len(overrides) > 1 else set()
    return [" ".join(one for one in given if one not in shared).replace("++", "") or "all" for given in overrides]


def metrics(rows: "pd.DataFrame") -> list[str]:
    """Metrics that every job has one value of for each method and retention; headlines first."""
    keys = ["job", "method", "retention"]
    counts = rows.groupby(["metric", *keys]).size()
    single = {str(metric) for metric, sizes in counts.groupby("metric") if (sizes == 1).all()}
    everywhere = {str(metric) for metric, jobs in rows.groupby("metric").job.nunique().items() if jobs == rows.job.nunique()}
    found = single & everywhere
    first = [name for name in _HEADLINES if name in found]
    return (first + [name for name in rows.metric.unique() if name in found - set(first)])[:_MOST]


def table(rows: "pd.DataFrame", found: list[str]) -> Any:
    """A line for each job, method and retention, with the metrics as columns."""
    from rich.table import Table

    wide = rows[rows.metric.isin(found)].pivot_table(
        index=["job", "method", "retention"], columns="metric", values="value", sort=False
    )
    made = Table(
        "job", "method", "retention", *(name.replace("_", " ") for name in found), title="all jobs", title_justify="left"
    )
    for (job, method, retention), values in wide.reindex(columns=found).iterrows():
        cells = ["–" if value != value else f"{value:.4g}" for value in values]
        made.add_row(str(job), str(method), f"{retention:g}", *cells)
    return made
