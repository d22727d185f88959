"""From the measurement of a latency profile to a planned run that uses it, on a tiny model."""

import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
from hydra.core.global_hydra import GlobalHydra

import experiments.run
from experiments.compose import composed
from experiments.part_settings import declared
from tests.experiments.test_run import SMALL, tiny_folder

__all__ = ["tiny_folder"]  # the fixture

LITTLE = ["study.repeats=2", "study.retentions=[0.1,0.6]"]


def used(arguments: list[str]) -> list[str]:
    """Those of the common arguments that the experiment asks for: it refuses the others."""
    named = [one for one in arguments if one.startswith(("+exp=", "study._target_="))]
    config = composed(named)
    needs = declared(config.study._target_, "needs")
    common = [*SMALL, "allocator=uniform"]
    return [one for one in common if re.match(r"\w+", one)[0] in needs]


@pytest.fixture
def run(tiny_folder, tmp_path, monkeypatch):
    """Runs here, not in a process of its own; returns the only folder of the experiment."""

    def command(experiment: str, *arguments: str) -> Path:
        where = ["model=local", f"model.path={tiny_folder}", "data=text", f"data.path={tiny_folder / 'text.txt'}"]
        where = where if "evaluation.windows=1" in used(list(arguments)) else []
        monkeypatch.setattr(sys, "argv", ["run", *where, *used(list(arguments)), f"paths.results={tmp_path}", *arguments])
        experiments.run.main()
        GlobalHydra.instance().clear()
        (folder,) = (tmp_path / "runs" / experiment).iterdir()
        return folder

    return command


def test_a_profile_is_measured_and_a_planned_run_uses_it(run, tmp_path):
    measured = run("latency_profile", "+exp=latency_profile", *LITTLE)
    rows = pd.read_parquet(measured / "rows.parquet")
    for metric in ("mean", "median", "p95"):
        assert set(rows[rows.metric == metric].stage) == {"prepare", "estimate", "select", "attend", "task_overhead"}
    assert (measured / "latency_profile.png").is_file()
    planned = run("planned", "experiment=planned", "pipeline=planned", f"pipeline.profile={measured / 'latency_profile.json'}")
    plain = run("plain", "experiment=plain", "estimator=int8_graph")
    read = [pd.read_parquet(folder / "rows.parquet").set_index(["method", "metric"]).value for folder in (planned, plain)]
    pd.testing.assert_series_equal(*read, rtol=1e-5)  # heads that share launches differ in nothing but rounding


def test_fig9_leaves_four_panels_and_a_trace(run):
    short = "sensitivity.window_tokens=96"  # the tiny model's context ends there
    folder = run("fig9", "+exp=fig9", "study.rounds=3", short, *LITTLE)
    rows = pd.read_parquet(folder / "rows.parquet")
    assert set(rows[rows.metric == "wall_time"].method) == {"batched", "serial", "overlap", "grouped", "planned"}
    assert set(rows[rows.method == "planned"].scheduler) == {"local_search"}
    assert set(rows[rows.method != "planned"].scheduler) == {""}
    assert set(rows.measured) == {"measured"}
    trace = json.loads((folder / "trace.json").read_text())
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == (rows.metric == "span").sum()
    assert (folder / "fig9.png").is_file()
