"""What the pages say runs: their files are written, their code is run, in a folder of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_module

DOCS = Path(__file__).parents[1] / "docs"
FILE = re.compile(r"<!-- file (?P<name>\S+) -->\n```\w+\n(?P<code>.*?)```", re.DOTALL)
RUN = re.compile(r"<!-- run -->\n```python\n(?P<code>.*?)```", re.DOTALL)
PAGES = [page.name for page in sorted(DOCS.glob("*.md")) if RUN.search(page.read_text())]


def written(page: str, folder: Path) -> None:
    for match in FILE.finditer((DOCS / page).read_text()):
        (folder / match["name"]).parent.mkdir(parents=True, exist_ok=True)
        (folder / match["name"]).write_text(match["code"])


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path):
    written(page, tmp_path)
    code = "\n".join(match["code"] for match in RUN.finditer((DOCS / page).read_text()))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_a_line_of_commands_has_one():
    blocks = [block for page in DOCS.glob("*.md") for block in re.findall(r"```.*?```", page.read_text(), re.DOTALL)]
    lines = [line for block in blocks for line in block.splitlines() if "python -m" in line]
    assert lines
    assert [line for line in lines if line.count("python -m") > 1] == []


def test_there_is_a_page_with_code():
    assert "own_estimator.md" in PAGES


@pytest.mark.parametrize("how", ["by its class", "by a file"])
def test_an_estimator_of_somebodys_runs_in_an_experiment(how, tmp_path):
    """As the page says, from the folder that holds it."""
    written("own_estimator.md", tmp_path)
    (tmp_path / "mine" / "estimator").mkdir(parents=True)
    (tmp_path / "mine" / "estimator" / "own_pages.yaml").write_text("_target_: own_pages.OwnPages\npage: 16\n")
    chosen = (
        ["estimator._target_=own_pages.OwnPages"]
        if how == "by its class"
        else ["estimator=own_pages", "estimator.page=8", "method=mine"]
    )
    command = ["--config-dir", "mine", *chosen, "allocator=uniform"]
    command += ["evaluation.windows=1", "evaluation.context_tokens=64", "graphs.calibration_windows=1", "graphs.chunk_tokens=32"]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("own_pages.OwnPages" if how == "by its class" else "mine") in done.stdout


def test_a_study_of_somebodys_runs(tmp_path):
    """As the page says, from the folder that holds it; again, nothing is measured; its settings are checked and swept."""
    written("own_study.md", tmp_path)
    command = ["--config-dir", "mine", "+exp=quarters", "evaluation.context_tokens=96"]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "results" / "runs" / "quarters").iterdir()
    assert (folder / "quarters.png").is_file()
    assert "done before" in run(command, tmp_path).stderr
    refused = run([*command, "study.window=3"], tmp_path)
    assert refused.stderr == "error: study.window: there is no such setting; did you mean study.windows?\n"
    refused = run([*command, "estimator=oracle"], tmp_path)
    assert "estimator: quarters does not use it; it uses model, data, evaluation, seed" in refused.stderr


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    return run_module("experiments.run", *command, folder=folder)
