"""Sweeps come together: one table and one figure over all jobs, and a status, whatever launched them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments import sweeps
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
    assert set(rows[rows.method == "shadowattn"].retention) == {0.1, 0.3}
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


def test_a_table_shows_what_every_job_has_one_value_of():
    rows = pd.DataFrame(
        [
            {"job": job, "method": method, "retention": 0.2, "metric": metric, "value": value}
            for job in ("x", "y")
            for method in ("dense", "ours")
            for metric, value in (("other", 1.0), ("perplexity", 2.0), ("per_head", 0.0), ("per_head", 1.0))
        ]
        + [{"job": "x", "method": "ours", "retention": 0.2, "metric": "only_x", "value": 1.0}]
    )
    assert sweeps.metrics(rows) == ["perplexity", "other"]
    shown = sweeps.table(rows, ["perplexity", "other"])
    assert list(shown.columns[0].cells) == ["x", "x", "y", "y"]


def test_an_experiment_of_other_rows_is_gathered_too(tmp_path):
    command = [sys.executable, "-m", "experiments.run", "-m", "+exp=fig10", "retention=0.1,0.2", f"paths.results={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert {path.name for path in Path(folder).iterdir()} >= {"rows.csv"}


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
