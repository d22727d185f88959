"""Published rows keep what they come from, and rows of other code are not published as today's."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from matplotlib.figure import Figure

from experiments import provenance, source
from experiments import publish as publishing
from experiments.environment import describe_machine
from experiments.provenance import measured_on, origin_line, origin_of_run, portable, portable_settings, state, write_csv
from experiments.publish import ROOT, check, publish, read_reference, redraw, reflag, study_of
from experiments.source import current_code, source_hash
from shadowattn import machine as hardware
from shadowattn.artifacts import sha256, versions, write_json
from shadowattn.errors import InputError
from shadowattn.reporting.flags import answer_flags, quality_flags

NOW = "2030-01-02T03:04:05+00:00"


def finished_run(folder: Path, **changed) -> Path:
    """A folder as a run leaves it, of a clean checkout; `changed` goes into its machine."""
    folder.mkdir(parents=True)
    pd.DataFrame({"experiment": ["tiny"] * 2, "value": [0.1, 1 / 3], "retention": [1.0, 1.0]}).to_parquet(folder / "rows.parquet")
    meta = {
        "command": "python -m experiments.run +exp=tiny data=text data.path=/home/me/wiki.txt paths.results=/tmp/x",
        "config": {"study": {"_target_": "experiments.studies.self_check.SelfCheck"}},
        "config_hash": "abc",
        "code": asdict(current_code({})),
        "machine": describe_machine() | {"git_commit": "c" * 40, "git_dirty": False} | changed,
        "versions": versions(),
        "started": NOW,
        "finished": NOW,
        "rows_sha256": sha256(folder / "rows.parquet"),
    }
    write_json(folder / "meta.json", meta)
    return folder


def test_a_published_csv_says_where_it_comes_from(tmp_path):
    written = publish(finished_run(tmp_path / "run"), root=tmp_path)
    csv = tmp_path / "results" / "reference" / "tiny.csv"
    assert written == [csv, csv.with_suffix(".json")]
    found = json.loads(written[1].read_text())
    assert found["command"] == "python -m experiments.run +exp=tiny data=text data.path=wiki.txt"
    assert (found["commit"], found["dirty"], found["config_hash"], found["rows"]) == ("c" * 40, False, "abc", 2)
    assert found["sha256"] == sha256(csv)
    assert found["code"] == source.source_hash()
    assert found["versions"] == versions()
    assert found["machine"]["cpu"] == hardware.cpu()
    assert "published_although" not in found
    assert state(csv) == "ok"
    pd.testing.assert_frame_equal(pd.read_csv(csv), pd.read_parquet(tmp_path / "run" / "rows.parquet"))


def test_of_further_figures_those_are_published_that_a_page_shows(tmp_path, monkeypatch):
    drawn = {name: Figure() for name in ("first", "second", "third")}
    monkeypatch.setattr(publishing, "study_of", lambda _: SimpleNamespace(figures=lambda rows: drawn))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("![What it shows](tiny_third.png), tiny_second.png\n")
    written = publish(finished_run(tmp_path / "run"), root=tmp_path)
    assert written[2:] == [tmp_path / "docs" / "tiny.png", tmp_path / "docs" / "tiny_third.png"]
    assert all(path.stat().st_size > 1000 for path in written[2:])


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"git_dirty": True}, "changes that are not in commit cccccccccc"), ({"git_commit": None}, "outside a checkout")],
)
def test_a_run_that_no_commit_describes_is_refused_unless_asked_for(changed, message, tmp_path):
    run = finished_run(tmp_path / "run", **changed)
    with pytest.raises(InputError, match=message):
        publish(run, root=tmp_path)
    assert not (tmp_path / "results").exists()
    publish(run, anyway=True, root=tmp_path)
    (reason,) = json.loads((tmp_path / "results" / "reference" / "tiny.json").read_text())["published_although"]
    assert message in reason


def test_a_run_of_other_code_is_refused_and_a_published_one_becomes_stale(tmp_path, monkeypatch):
    run = finished_run(tmp_path / "run")
    publish(run, root=tmp_path)
    monkeypatch.setattr(provenance, "source_hash", lambda: "edited")
    assert state(tmp_path / "results" / "reference" / "tiny.csv") == "stale"
    with pytest.raises(InputError, match=r"other code .* than is checked out \(edited\)"):
        publish(run, root=tmp_path)


def test_a_run_of_another_command_replaces_published_rows_only_when_that_is_meant(tmp_path):
    csv = publish(finished_run(tmp_path / "run"), root=tmp_path)[0]
    toy, content = finished_run(tmp_path / "toy"), csv.read_bytes()
    meta = json.loads((toy / "meta.json").read_text())
    write_json(toy / "meta.json", meta | {"command": f"{meta['command']} evaluation.windows=1"})
    with pytest.raises(InputError, match=r"like the rows that are published, got one of `.* evaluation.windows=1`"):
        publish(toy, root=tmp_path)
    assert csv.read_bytes() == content
    publish(toy, other_command=True, root=tmp_path)
    assert "evaluation.windows=1" in json.loads(csv.with_suffix(".json").read_text())["command"]


def test_altered_rows_and_runs_that_say_too_little_are_refused(tmp_path):
    run = finished_run(tmp_path / "altered")
    (run / "rows.parquet").write_bytes((run / "rows.parquet").read_bytes()[:-3])
    with pytest.raises(InputError, match="altered"):
        publish(run, root=tmp_path)
    run = finished_run(tmp_path / "old")
    meta = json.loads((run / "meta.json").read_text())
    write_json(run / "meta.json", {name: value for name, value in meta.items() if name not in ("command", "code")})
    with pytest.raises(InputError, match="an older one; measure again"):
        publish(run, root=tmp_path)
    with pytest.raises(InputError, match="folder of a finished run"):
        publish(tmp_path / "nothing", root=tmp_path)


def test_the_list_names_every_state(tmp_path, monkeypatch):
    reference = tmp_path / "results" / "reference"
    rows = pd.DataFrame({"value": [1.0]})
    source = origin_of_run(json.loads((finished_run(tmp_path / "run") / "meta.json").read_text()))
    for name in ("altered", "fine"):
        write_csv(rows, reference / f"{name}.csv", source)
    (reference / "altered.csv").write_text("value\n2.0\n")
    (reference / "bare.csv").write_text("value\n1.0\n")
    assert [state(reference / f"{name}.csv") for name in ("altered", "bare", "fine")] == ["altered", "no sidecar", "ok"]
    assert list(check(tmp_path).columns[1].cells) == ["altered", "no sidecar", "ok"]


def test_a_command_names_no_folder_of_this_machine():
    command = "python -m experiments.run --config-dir /home/me/conf 'data.path=~/a b.txt' paths.results=/x model.path=models/m"
    expected = "python -m experiments.run --config-dir conf 'data.path=a b.txt' model.path=models/m"
    assert portable(command) == expected


def test_settings_name_no_folder_of_this_machine():
    settings = {"runners": {"a": {"path": "/home/me/model.gguf", "lengths": [1, "~/x.txt"]}}, "name": "a/b"}
    assert portable_settings(settings) == {"runners": {"a": {"path": "model.gguf", "lengths": [1, "x.txt"]}}, "name": "a/b"}


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "reference").glob("*.json")), ids=lambda path: path.stem)
def test_published_rows_name_no_folder_and_their_study_is_built_anywhere(path):
    source = json.loads(path.read_text())
    assert source.get("study") == portable_settings(source.get("study"))
    assert study_of(source)


def test_processors_of_one_name_are_told_apart(monkeypatch):
    text = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: AMD EPYC\nstepping\t: 1\n\n"
    names = []
    for family, model in ((25, 17), (26, 2)):
        monkeypatch.setattr(Path, "read_text", lambda _, family=family, model=model: text.format(family, model))
        assert hardware.cpu() == {
            "vendor": "AuthenticAMD", "name": "AMD EPYC", "family": str(family), "model": str(model), "stepping": "1",
        }  # fmt: skip
        names.append(hardware.processor())
    assert names == ["AMD EPYC (family 25, model 17, stepping 1)", "AMD EPYC (family 26, model 2, stepping 1)"]


def test_the_command_refuses_in_one_line():
    command = [sys.executable, "-m", "experiments.publish", "no/such/run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: expected the folder of a finished run")
    assert len(done.stderr.splitlines()) == 1


def test_published_figures_are_drawn_anew_from_their_rows_and_say_where_those_were_measured(tmp_path, monkeypatch):
    reference = tmp_path / "results" / "reference"
    reference.mkdir(parents=True)
    for name in ("graphs.csv", "graphs.json"):
        shutil.copy(ROOT / "results" / "reference" / name, reference)
    said = []
    monkeypatch.setattr("experiments.publish.save", lambda figure, path, below: said.append((path, below)) or path)
    assert redraw(reference / "graphs.csv", tmp_path) == [tmp_path / "docs" / "graphs.png"]
    made = json.loads((reference / "graphs.json").read_text())
    assert said == [(tmp_path / "docs" / "graphs.png", measured_on(made["machine"], made["commit"], False))]
    assert made["commit"][:7] in said[0][1]


def test_simulated_rows_name_the_device_that_was_simulated_and_not_this_machine():
    machine = {"processor": "EPYC", "cores": 2}
    rows = pd.DataFrame({"measured": ["simulated"] * 2, "device": ["Snapdragon 8 Gen 3"] * 2})
    assert origin_line(rows, machine, "0123456789", False) == "simulated: Snapdragon 8 Gen 3, commit 0123456"
    assert origin_line(rows.drop(columns="device"), machine, None, None) == "simulated"
    assert origin_line(rows.assign(measured=["measured", "simulated"]), machine, None, None) == "EPYC, 2 cores"


PUBLISHED = sorted((ROOT / "results" / "reference").glob("*.csv"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_losses_have_the_flags_of_their_values(path):
    rows = read_reference(path)
    if "flag" in rows:
        flags = answer_flags(rows.assign(flag=quality_flags(rows)))
        assert flags[flags != rows.flag].to_dict() == {}, "python -m experiments.publish --reflag"


def test_flags_of_older_rows_are_set_and_nothing_else(tmp_path):
    reference = tmp_path / "results" / "reference"
    reference.mkdir(parents=True)
    for name in ("quickstart.csv", "quickstart.json"):
        shutil.copy(ROOT / "results" / "reference" / name, reference)
    path = reference / "quickstart.csv"
    rows = read_text_columns(path)
    assert (rows.flag != "").any()
    write_csv(rows.assign(flag=""), path, json.loads(path.with_suffix(".json").read_text()))
    assert reflag(path, tmp_path) == [path, path.with_suffix(".json"), tmp_path / "docs" / "quickstart.png"]
    assert read_text_columns(path).equals(rows)
    assert state(path) in ("ok", "stale")
    assert json.loads(path.with_suffix(".json").read_text())["flags_of_code"] == source_hash()
    assert reflag(path, tmp_path) == []


def read_text_columns(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str, keep_default_na=False)
