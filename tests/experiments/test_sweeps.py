"""Sweeps come together: one table and one figure over all jobs, and a status, whatever launched them."""

import json
import os
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from experiments import sweeps
from experiments.publish import read_reference, study_of
from shadowattn.reporting.figures.sweep import draw as draw_sweep
from shadowattn.reporting.style import ALL_KEYS
from tests.commands import ROOT, run_module, run_python
from tests.experiments.test_source import SMALL as SMALL_ONE

SMALL = [one for one in SMALL_ONE if not one.startswith("retention=")]


PROCESSES = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
LAUNCHERS = pytest.mark.parametrize("launcher", [[], PROCESSES], ids=["in turn", "processes"])


def run(*arguments: str) -> subprocess.CompletedProcess:
    return started(*arguments, *SMALL)


def started(*arguments: str, **where: str | Path) -> subprocess.CompletedProcess:
    if PROCESSES[0] in arguments:
        return run_python("-m", "experiments.run", *arguments, **where)
    return run_module("experiments.run", *arguments, **where)


@LAUNCHERS
def test_all_jobs_end_in_one_table_one_figure_and_a_status(launcher, tmp_path):
    done = run("-m", *launcher, "retention=0.1,2,0.3", f"paths.results={tmp_path}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert errors[-1] == "error: 1 jobs of the sweep failed, the others are done: job 1 (retention=2)"
    assert "all jobs" in done.stdout
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert (folder / "sweep.png").stat().st_size > 10_000
    rows = pd.read_csv(folder / "rows.csv")
    assert list(rows.job.unique()) == ["retention=0.1", "retention=0.3"]
    assert set(rows[rows.method == "oracle"].retention) == {0.1, 0.3}
    assert json.loads((folder / "job_1.json").read_text())["error"].startswith("retention: expected a share")


def test_jobs_are_named_by_what_they_differ_in():
    names = sweeps.job_names([["a=1", "b=2", "c=3"], ["a=1", "b=4", "c=3"]])
    assert names == ["b=2", "b=4"]
    assert sweeps.job_names([["a=1"]]) == ["a=1"]


def test_a_table_shows_the_studys_headline_of_the_whole_model():
    rows = pd.DataFrame(
        [
            {"job": job, "method": method, "retention": 0.2, "head": head, "metric": metric, "value": value, "unit": "1", "n": 1}
            for job in ("x", "y")
            for method in ("dense", "ours")
            for metric, head, value in (("other", -1, 1.0), ("loss", -1, 2.0), ("loss", 0, 9.0), ("loss_error", -1, 0.5))
        ]
    ).assign(measured="measured")
    assert sweeps.metrics(rows, ["loss", "unheard_of"]) == ["loss"]
    assert sweeps.metrics(rows, []) == ["other"]
    shown = sweeps.table(rows, ["loss", "other"])
    assert list(shown.columns[0].cells) == ["x", "x", "y", "y"]
    assert list(shown.columns[3].cells) == ["2 (1.5 … 2.5)"] * 4


# Rows of one run of each study.
REFERENCE = {
    json.loads(path.with_suffix(".json").read_text())["study"]["_target_"]: path
    for path in sorted((ROOT / "results" / "reference").glob("*.csv"), reverse=True)
}


@pytest.mark.parametrize("path", REFERENCE.values(), ids=[path.stem for path in REFERENCE.values()])
def test_every_experiment_has_a_table_and_a_figure_of_a_sweep(path):
    """One job alone, and two: of the metrics that the study names, as far as these rows have them."""
    one = read_reference(path)
    study = study_of(json.loads(path.with_suffix(".json").read_text()))
    assert study.headline, f"{type(study).__name__} names no metric"
    for jobs in (1, 2):
        rows = pd.concat([one.assign(job=f"seed={job}", value=one.value * (1 + 0.1 * job)) for job in range(jobs)])
        shown = sweeps.metrics(rows, study.headline)
        assert shown[0] == next(metric for metric in study.headline if metric in set(one.metric))
        made = sweeps.table(rows, shown)
        assert 0 < made.row_count <= 12 * rows.drop_duplicates(["job", "method", "retention"]).shape[0]
        figure = draw_sweep(rows, shown[0])
        assert any(axis.lines or axis.containers for axis in figure.axes)
        simulated = set(rows.measured[rows.metric == shown[0]]) == {"simulated"}
        assert figure.get_suptitle().startswith("SIMULATED") == simulated
        assert ("simulated" in made.title) == ("simulated" in set(rows.measured[rows.metric.isin(shown)]))


def test_a_sweep_draws_methods_that_attend_to_every_key_in_every_job():
    rows = pd.DataFrame(
        [
            {"job": job, "method": method, "retention": retention, "allocator": allocator, "value": value + (job == "b")}
            for job in "ab"
            for method, retention, allocator, value in (
                *(("ours", at, "uniform", at) for at in (0.1, 0.2)),
                ("npu_full", 1.0, ALL_KEYS, 2.0),
                ("dense", 1.0, "none", 3.0),
            )
        ]
    ).assign(metric="loss", unit="nat", n=1, model="m", measured="measured")
    labels = {line.get_label() for line in draw_sweep(rows, "loss").axes[0].lines}
    assert {"npu_full a", "npu_full b", "dense a", "dense b"} <= labels


def test_an_experiment_of_other_rows_is_gathered_too(tmp_path):
    done = run_module("experiments.run", "-m", "+exp=fig10", "retention=0.1,2", f"paths.results={tmp_path}")
    assert done.returncode == 2, done.stderr  # one of the two jobs cannot be
    assert "all jobs · simulated" in done.stdout
    assert "largest speedup" in done.stdout
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert {path.name for path in Path(folder).iterdir()} >= {"rows.csv", "sweep.png"}
    assert str(folder / "rows.csv") in done.stdout


STUDY = """
import os
import sys
import time
from dataclasses import dataclass
from experiments.studies.base import Study

@dataclass(frozen=True)
class Odd(Study):
    count: int = 1

    def measure(self, lab):
        if self.count == 2:
            raise RuntimeError("boom")
        if self.count == 4:
            sys.exit(3)
        if self.count == 5:
            while not list(lab.root.glob("runs/*/*/meta.json")):
                time.sleep(0.1)  # until another job is done
            os._exit(9)  # as the kernel does to one that takes all memory
        return [lab.row()]

    def table(self, rows, title):
        return title
"""


def run_odd(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    (folder / "odd.py").write_text(STUDY)
    path = os.pathsep.join([str(folder), str(ROOT)])  # for the processes of a launcher too
    return started("-m", "study._target_=odd.Odd", *arguments, folder=folder, PYTHONPATH=path)


@LAUNCHERS
def test_a_defect_or_an_exit_of_one_job_is_named_and_the_others_run(launcher, tmp_path):
    done = run_odd(tmp_path, *launcher, "study.count=4,1,2", f"paths.results={tmp_path / 'a'},{tmp_path / 'b'}")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    exited = sorted(error for error in errors if error.endswith(": SystemExit: 3"))  # two workers end in any order
    assert [error.split(" (")[0] for error in exited] == ["error: job 0", "error: job 1"]
    assert exited[0].startswith("error: job 0 (study._target_=odd.Odd study.count=4")
    assert errors[-1] == done.stderr.splitlines()[-1]
    assert errors[-1].startswith("error: 4 jobs of the sweep failed, the others are done: job 0 (study.count=4")
    assert errors[-1].count("study.count=2") == 2
    assert "RuntimeError: boom" in done.stderr  # with its trace
    assert len(list(tmp_path.glob("[ab]/runs/*/*/meta.json"))) == 2
    assert len(list(tmp_path.glob("results/sweeps/*/rows.csv"))) == 1


def test_a_killed_worker_costs_no_other_job_its_result(tmp_path):
    """Two workers, of which one is killed once the other has measured; the launcher then begins no further job."""
    done = run_odd(tmp_path, *PROCESSES, "hydra.launcher.pre_dispatch=2", "study.count=1,5,6,7,8,9", f"paths.results={tmp_path}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith("error: the launcher of the sweep ended early (TerminatedWorkerError: ")
    assert "error: job 1 (study.count=5): its process ended before the job did" in errors
    assert errors[-1].startswith(f"error: {len(errors) - 2} jobs of the sweep failed, the others are done: job 1 (study.count=5)")
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert (folder / "sweep.png").is_file()
    measured = set(pd.read_csv(folder / "rows.csv").job)
    assert "study.count=1" in measured
    assert len(measured) + len(errors) - 2 == 6


def test_a_job_that_never_began_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SHADOWATTN_SWEEP", str(tmp_path))
    sweeps.record(0, {"overrides": ["seed=0"], "folder": "", "error": ""})
    assert sweeps.finish(tmp_path, [["seed=0"], ["seed=1"]]) == {"job 1 (seed=1)": sweeps.NOT_BEGUN}
