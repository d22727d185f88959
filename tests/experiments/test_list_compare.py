"""What was run, and several runs side by side."""

import json
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import pandas as pd
import pytest

from experiments import compare
from experiments import list as listing
from experiments.source import current_code
from shadowattn.artifacts import sha256
from shadowattn.errors import InputError
from shadowattn.runs import load_run
from tests.commands import ROOT, run_module

KILLED = """
import os
from dataclasses import dataclass
from experiments.studies.base import Study

@dataclass(frozen=True)
class Odd(Study):
    count: int = 1

    def measure(self, lab):
        os._exit(9)

    def table(self, rows, title):
        return title
"""
NOW = datetime.now(UTC)


def finished(results, name, *, retention=0.2, model="bundled", code=None, target="", age=timedelta(hours=3), value=1.0):
    folder = results / "runs" / name
    folder.mkdir(parents=True)
    rows = [
        ("dense", 1.0, "loss_increase", 0.0),
        ("ours", retention, "loss_increase", value),
        ("ours", retention, "density", 0.2),
    ]
    frame = pd.DataFrame(rows, columns=["method", "retention", "metric", "value"])
    frame.assign(model=model, corpus_sha256="c", context_tokens=64, n=3).to_parquet(folder / "rows.parquet")
    config = {"retention": retention, "selection": {"sinks": 0}, **({"estimator": {"_target_": target}} if target else {})}
    meta = {
        "command": f"python -m experiments.run +exp=quickstart retention={retention} paths.results=x",
        "config": config,
        "code": asdict(current_code(config)) | (code or {}),
        **({"model": {"name": model}} if model else {}),
        "finished": (NOW - age).isoformat(),
        "rows_sha256": sha256(folder / "rows.parquet"),
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def test_runs_are_listed_with_settings_state_and_age(tmp_path):
    finished(tmp_path, "quickstart/0001")
    finished(tmp_path, "quickstart/0002", retention=0.4, code={"source": "older"}, age=timedelta(days=2))
    finished(tmp_path, "sweep/0003", age=timedelta(minutes=5))
    (tmp_path / "runs" / "sweep" / "0004").mkdir()
    (tmp_path / "runs" / "sweep" / "0005").mkdir()
    (tmp_path / "runs" / "sweep" / "0005" / "meta.json").write_text("{")
    found = listing.runs(tmp_path)
    assert [run.folder.name for run in found[:3]] == ["0003", "0001", "0002"]
    states = {run.folder.name: run.state for run in found}
    assert states == {"0001": "done", "0002": "other code", "0003": "done", "0004": "unfinished", "0005": "damaged"}
    assert found[1].settings == "retention=0.2"
    shown = listing.table(found, NOW)
    assert list(shown.columns[4].cells)[:3] == ["5 min", "3 h", "2 d"]
    assert [run.folder.name for run in listing.runs(tmp_path, "quickstart")] == ["0001", "0002"]


def test_an_unfinished_run_is_listed_with_what_it_was_asked_for(tmp_path):
    """Killed while it measured: by `os._exit`, after which nothing more is written."""
    (tmp_path / "odd.py").write_text(KILLED)
    command = "study._target_=odd.Odd", "study.count=2", f"paths.results={tmp_path}"
    killed = run_module("experiments.run", *command, folder=tmp_path)
    assert killed.returncode == 9
    (unfinished,) = listing.runs(tmp_path)
    assert (unfinished.state, unfinished.settings) == ("unfinished", "study._target_=odd.Odd study.count=2")
    assert timedelta() < datetime.now(UTC) - unfinished.since < timedelta(minutes=5)
    finished(tmp_path, "quickstart/0001", age=timedelta(days=9))
    assert [run.state for run in listing.runs(tmp_path)] == ["done", "unfinished"]


def test_a_run_without_a_model_is_done(tmp_path):
    finished(tmp_path, "fig10/0001", model="")
    (found,) = listing.runs(tmp_path)
    assert (found.state, found.model, found.settings) == ("done", "", "retention=0.2")


def test_runs_of_other_kernels_versions_and_parts_are_of_other_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for part in ("kept", "edited", "unreadable"):
        (tmp_path / f"{part}.py").write_text("class Mine: ...\n")
        finished(tmp_path, f"quickstart/{part}", target=f"{part}.Mine")
    finished(tmp_path, "quickstart/kernels", code={"kernels": "older"})
    finished(tmp_path, "quickstart/versions", code={"versions": {"torch": "0.1"}})
    (tmp_path / "edited.py").write_text("class Mine:\n    bits = 2\n")
    (tmp_path / "unreadable.py").write_text("class (\n")
    done = [run.folder.name for run in listing.runs(tmp_path) if run.state == "done"]
    assert done == ["kept"]
    assert {run.state for run in listing.runs(tmp_path)} == {"done", "other code"}


def test_a_list_needs_no_torch(tmp_path):
    finished(tmp_path, "quickstart/0001")
    code = f"""
import sys
from experiments import list
sys.argv = ["list", "--results", {str(tmp_path)!r}]
list.main()
print("torch" in sys.modules, "pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "False False", done.stderr
    assert " done " in done.stdout


def test_runs_are_joined_by_method_and_retention(tmp_path):
    folders = [finished(tmp_path, f"quickstart/000{i}", retention=r, value=v) for i, r, v in ((1, 0.2, 1.5), (2, 0.4, 0.5))]
    runs = [load_run(folder) for folder in folders]
    joined = compare.join(runs, "loss_increase")
    assert list(joined.columns) == ["retention=0.2", "retention=0.4"]
    assert joined.loc[("ours", 0.2)].tolist()[0] == 1.5
    assert joined.loc[("ours", 0.4)].tolist()[1] == 0.5
    assert joined.loc[("dense", 1.0)].tolist() == [0.0, 0.0]
    assert compare.differences(runs, "loss_increase") == []
    cells = list(compare.table(joined, "loss").columns[2].cells)
    assert cells == ["0", "1.5", "–"]
    with pytest.raises(InputError, match=r"--metric: expected one of density, loss_increase, got 'taste'"):
        compare.join(runs, "taste")


def test_the_metric_to_compare_is_one_that_the_runs_have(tmp_path):
    runs = [load_run(finished(tmp_path, f"fig10/000{i}", retention=r)) for i, r in ((1, 0.2), (2, 0.4))]
    assert compare.default_metric(runs) == "loss_increase"
    for run in runs:
        run.rows["metric"] = run.rows.metric.replace({"loss_increase": "latency"})
        run.rows.loc[len(run.rows)] = run.rows.iloc[0]  # two latencies of a method: no table of them
    assert compare.default_metric(runs) == "density"
    for run in runs:
        run.rows["metric"] = "latency"
    with pytest.raises(InputError, match="--metric: expected runs that share a metric"):
        compare.default_metric(runs)


def test_runs_of_another_machine_and_simulated_ones_are_named(tmp_path):
    runs = [load_run(finished(tmp_path, f"quickstart/000{i}")) for i in (1, 2)]
    for run, processor, measured in zip(runs, ("A", "B"), ("measured", "simulated"), strict=True):
        run.meta["machine"] = {"processor": processor, "cores": 2}
        run.rows["measured"] = measured
    assert compare.differences(runs, "loss_increase") == ["measured, simulated or compiled", "machine"]


def test_runs_of_other_subjects_are_named(tmp_path):
    folders = [finished(tmp_path, "quickstart/0001"), finished(tmp_path, "quickstart/0002", model="another")]
    runs = [load_run(folder) for folder in folders]
    assert compare.differences(runs, "loss_increase") == ["model"]
    assert compare.names(runs) == ["quickstart/0001", "quickstart/0002"]  # no setting tells them apart


def test_only_rows_of_the_compared_metric_count(tmp_path):
    runs = [load_run(finished(tmp_path, f"quickstart/000{i}")) for i in (1, 2)]
    runs[1].rows.loc[runs[1].rows.metric == "density", "n"] = 9
    assert compare.differences(runs, "loss_increase") == []
    assert compare.differences(runs, "density") == ["n"]


@pytest.mark.parametrize(("module", "arguments"), [(listing, []), (compare, ["quickstart/0001", "quickstart/0002"])])
def test_the_command_line(module, arguments, tmp_path, monkeypatch, capsys):
    finished(tmp_path, "quickstart/0001")
    finished(tmp_path, "quickstart/0002", retention=0.4)
    monkeypatch.setattr(sys, "argv", ["x", *arguments, "--results", str(tmp_path)])
    assert module.main() == 0
    assert "retention=0.4" in capsys.readouterr().out
    if module is compare:
        monkeypatch.setattr(sys, "argv", ["x", *arguments, "--results", str(tmp_path), "--csv", str(tmp_path / "new" / "a.csv")])
        assert module.main() == 0
        assert pd.read_csv(tmp_path / "new" / "a.csv").method.tolist() == ["dense", "ours", "ours"]


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (listing, ["--results", "nowhere"], "error: nowhere: found no runs; begin with"),
        (listing, ["unheard_of", "--results", "nowhere"], "found no runs of unheard_of"),
        (compare, ["nowhere/0001"], "no meta.json in it"),
        (listing, ["paths.results=x"], "error: paths.results=x: expected an experiment, got a setting; use --results x"),
    ],
)
def test_what_is_not_there_is_one_line(module, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
