"""Sweeps come together: one table and one figure over all jobs, and a status, whatever launched them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments import sweeps
from experiments.publish import read_reference, study_of
from shadowattn.reporting.figures.sweep import draw as draw_sweep
from shadowattn.reporting.style import ALL_KEYS
from tests.experiments.test_run import ROOT
from tests.experiments.test_source import SMALL as SMALL_ONE

SMALL = [one for one in SMALL_ONE if not one.startswith("retention=")]


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.run", *arguments, *SMALL]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("launcher", [[], ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]], ids=["in turn", "processes"])
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


def test_a_job_that_was_killed_counts_as_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("SHADOWATTN_SWEEP", str(tmp_path))
    sweeps.record(0, {"overrides": ["seed=0"], "folder": str(tmp_path / "run"), "error": ""})
    sweeps.record(1, {"overrides": ["seed=1"], "folder": "", "error": "stopped"})
    assert sweeps.finish(tmp_path) == ["job 1 (seed=1)"]


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


REFERENCE = sorted((ROOT / "results" / "reference").glob("*.csv"))


@pytest.mark.parametrize("path", REFERENCE, ids=[path.stem for path in REFERENCE])
def test_every_experiment_has_a_table_and_a_figure_of_a_sweep(path):
    """One job alone, and two: of the metrics that the study names, all of which it measures."""
    one = read_reference(path)
    study = study_of(json.loads(path.with_suffix(".json").read_text()))
    assert study.headline, f"{type(study).__name__} names no metric"
    for jobs in (1, 2):
        rows = pd.concat([one.assign(job=f"seed={job}", value=one.value * (1 + 0.1 * job)) for job in range(jobs)])
        shown = sweeps.metrics(rows, study.headline)
        assert shown[0] == study.headline[0]
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
    command = [sys.executable, "-m", "experiments.run", "-m", "+exp=fig10", "retention=0.1,2", f"paths.results={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr  # one of the two jobs cannot be
    assert "all jobs · simulated" in done.stdout
    assert "largest speedup" in done.stdout
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert {path.name for path in Path(folder).iterdir()} >= {"rows.csv", "sweep.png"}
    assert str(folder / "rows.csv") in done.stdout


STUDY = """
from dataclasses import dataclass
from experiments.studies.base import Study

@dataclass(frozen=True)
class Odd(Study):
    count: int = 1

    def measure(self, lab):
        if self.count == 2:
            raise RuntimeError("boom")
        return [lab.row()]

    def table(self, rows, title):
        return title
"""


@pytest.mark.parametrize("launcher", [[], ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]], ids=["in turn", "processes"])
def test_a_defect_in_one_job_is_named_and_the_others_run(launcher, tmp_path):
    (tmp_path / "odd.py").write_text(STUDY)
    how = ["study._target_=odd.Odd", "study.count=1,2,3", f"paths.results={tmp_path / 'a'},{tmp_path / 'b'}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "experiments.run", "-m", *launcher, *how]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: 2 jobs of the sweep failed, the others are done: job ")
    assert last.count("study.count=2") == 2
    assert "RuntimeError: boom" in done.stderr  # with its trace
    assert len(list(tmp_path.glob("[ab]/runs/*/*/meta.json"))) == 4
