"""Results know their code: what is edited is measured again, and nothing else is."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments import source
from experiments.part_targets import check_modules, check_targets, named_targets
from experiments.source import Code, part_hashes, stage_code
from shadowattn.errors import InputError
from tests.commands import ROOT, run_module

ESTIMATOR = """
import mine_sign
from shadowattn.online.estimators.oracle import Oracle


class Mine(Oracle):
    def scores(self, chunk):
        return mine_sign.SIGN * super().scores(chunk)
"""
SMALL = [
    *("data=text", f"data.path={ROOT / 'README.md'}"),  # of which every run makes tokens
    *("model=random", "model.shape=qwen2_0_5b", "model.layers=1", "model.hidden=64", "model.vocabulary=2560"),
    *("evaluation.windows=1", "evaluation.fidelity_windows=0", "evaluation.context_tokens=96", "graphs.chunk_tokens=32"),
    *("graphs.calibration_windows=1", "allocator=uniform", "retention=0.1", "estimator=oracle"),
]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The command line, started in a folder with a user's own modules."""
    command = *SMALL, "paths.results=results", *arguments
    return run_module("experiments.run", *command, folder=folder, PYTHONDONTWRITEBYTECODE="1")


def perplexity(folder: Path) -> float:
    (rows,) = folder.glob("results/runs/default/*/rows.parquet")
    frame = pd.read_parquet(rows)
    return frame[(frame.metric == "perplexity") & ~frame.method.isin(("dense", "npu_full"))].value.iloc[0]


def test_an_edit_of_a_users_estimator_is_measured(tmp_path):
    """The same command four times; between two of them a module that the estimator imports changes its sign."""
    (tmp_path / "mine.py").write_text(ESTIMATOR)
    (tmp_path / "mine_sign.py").write_text("SIGN = 1\n")
    own = "estimator._target_=mine.Mine"
    first = run(tmp_path, own)
    assert first.returncode == 0, first.stderr
    right = perplexity(tmp_path)
    assert "done before" in run(tmp_path, own).stderr
    (tmp_path / "mine_sign.py").write_text("SIGN = -1\n")
    shown = run(tmp_path, own, "reuse=any")
    assert "done before, measured with other code (mine.Mine)" in shown.stderr
    assert "measured with other code" in shown.stdout
    assert perplexity(tmp_path) == right
    again = run(tmp_path, own)
    assert again.returncode == 0, again.stderr
    assert "measured with other code (mine.Mine), measuring again" in again.stderr
    assert "scales:" not in again.stderr  # a stage that the estimator takes no part in
    assert perplexity(tmp_path) != right
    assert not list((tmp_path / "results" / "replaced").glob("*/*"))


def test_an_edit_of_the_package_is_measured_cells_and_stages_too(tmp_path, monkeypatch, capsys):
    import experiments.run

    def run_here() -> str:
        monkeypatch.setattr(sys, "argv", ["run", *SMALL, f"paths.results={tmp_path}"])
        experiments.run.main()
        return capsys.readouterr().err

    run_here()
    (folder,) = (tmp_path / "runs" / "default").iterdir()
    (stage,) = (tmp_path / "artifacts").glob("scales-*")
    (cell,) = folder.glob("cells/oracle@*.json")
    cell.write_text(json.dumps(json.loads(cell.read_text()) | {"loss": 99.0}))
    assert "done before" in run_here()
    monkeypatch.setattr(source, "source_hash", lambda: "edited")
    (folder / "meta.json").unlink()  # as if it had been killed before the edit: what is there is not gone on with
    said = run_here()
    assert "2 cells to do" in said
    assert "source of shadowattn" in said
    assert f"{stage.name} was measured with other code" in said
    rows = pd.read_parquet(folder / "rows.parquet")
    assert rows[rows.metric == "loss"].value.max() < 99
    assert json.loads((folder / "meta.json").read_text())["code"]["source"] == "edited"
    assert "done before" in run_here()


def test_a_changed_byte_changes_the_hash(tmp_path, monkeypatch):
    for package in ("shadowattn", "experiments"):
        (tmp_path / package).mkdir()
    files = {name: tmp_path / name for name in ("shadowattn/a.py", "experiments/b.py", "shadowattn/k.cpp", "CMakeLists.txt")}
    for path in files.values():
        path.write_text("x = 1\n")
    monkeypatch.setattr(source, "_ROOT", tmp_path)
    seen = {source.source_hash.__wrapped__()}
    for path in files.values():
        path.write_text("x = 2\n")
        seen.add(source.source_hash.__wrapped__())
    assert len(seen) == 1 + len(files)
    (tmp_path / "shadowattn" / "notes.md").write_text("not code")
    assert source.source_hash.__wrapped__() in seen


def test_parts_of_this_project_are_its_source_and_others_their_files(tmp_path, monkeypatch):
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("from . import helper\nimport json\nclass Part: ...\n")
    (package / "helper.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"a": {"_target_": "theirs.part.Part"}, "b": [{"_target_": "shadowattn.online.estimators.oracle.Oracle"}]}
    assert named_targets(settings) == {"a._target_": settings["a"]["_target_"], "b.0._target_": settings["b"][0]["_target_"]}
    before, stage = part_hashes(settings), stage_code(settings)
    assert list(before) == ["theirs.part.Part"]
    (package / "helper.py").write_text("VALUE = 2\n")
    assert part_hashes(settings) != before
    assert stage_code(settings) != stage
    assert stage_code() == stage_code({"b": settings["b"]})


@pytest.mark.parametrize("build", ["", "_native.so"])
def test_the_kernels_are_found_without_their_package(build, tmp_path, monkeypatch):
    from shadowattn.kernels import native

    (tmp_path / "_native.so").touch()
    monkeypatch.setenv("SHADOWATTN_NATIVE", build and str(tmp_path / build))
    assert source.kernels_path() == native.path()


def test_what_differs_is_named():
    code = Code("a", {"mine.Mine": "1"}, "k", {"python": "3", "torch": "2"})
    recorded = {"source": "b", "parts": {"mine.Mine": "1", "other.Part": "2"}, "kernels": "k", "versions": {"python": "3"}}
    assert code.differences(recorded) == ["source of shadowattn, experiments", "other.Part", "version of torch"]
    assert code.differences({"source": "a", "parts": {"mine.Mine": "1"}, "kernels": "k", "versions": dict(code.versions)}) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no module 'broken'"),
        ("", "broken.Part"),
        ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found' (broken.py:1)"),
        ("x = 1", "broken.Part"),
        ("\n1 / 0", "ZeroDivisionError: division by zero (broken.py:2)"),
    ],
)
def test_a_part_that_cannot_be_imported_is_one_line(content, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    if content is not None:
        (tmp_path / "broken.py").write_text(content)
    with pytest.raises(InputError) as refused:
        (check_modules if content is None else check_targets)({"estimator": {"_target_": "broken.Part"}})
    assert message in str(refused.value)
    assert "estimator._target_: expected MODULE.NAME" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine.Mne", "mine.py defines no Mne; did you mean Mine?"),
        ("mine.inner.Mine", "mine.py defines no inner"),
        ("pack.part.Prat", "part.py defines no Prat; did you mean Part?"),
        ("pack.prat.Part", "__init__.py defines no prat"),
        ("shadowattn.online.estimators.oracle.Orcale", "oracle.py defines no Orcale; did you mean Oracle?"),
        ("mine.losses", "mine.py defines no losses"),
        ("mine.Loss", "mine.py defines no Loss; check the spelling"),
        ("mine.Mine", None),
        ("mine.Other", None),
        ("switched.Anything", None),
        ("pack.part.Part.of", None),
        ("dynamic.Anything", None),
        ("wrong.Anything", None),
        ("math.sin", None),
    ],
)
def test_a_misspelt_part_of_a_known_module_is_named_before_anything_is_imported(target, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "pack").mkdir()
    never = "raise AssertionError('imported')\n"
    for name, content in (
        ("mine.py", "class Mine:\n    def measure(self):\n        losses = 1\ntry:\n    Other = Mine\nfinally: ...\n"),
        ("switched.py", "def switch():\n    global Anything\n"),
        ("pack/__init__.py", ""),
        ("pack/part.py", "from mine import Mine as Part\n"),
        ("dynamic.py", "def __getattr__(name): ...\n"),
        ("wrong.py", "def (\n"),
    ):
        (tmp_path / name).write_text(never + content)
    if message is None:
        check_modules({"estimator": {"_target_": target}})
        return
    with pytest.raises(InputError) as refused:
        check_modules({"estimator": {"_target_": target}})
    assert message in str(refused.value)
