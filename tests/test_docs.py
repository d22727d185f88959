"""What the pages say runs: their files are written, their code is run, in a folder of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
FILE = re.compile(r"<!-- file (?P<name>\S+) -->\n```python\n(?P<code>.*?)```", re.DOTALL)
RUN = re.compile(r"<!-- run -->\n```python\n(?P<code>.*?)```", re.DOTALL)
PAGES = [page.name for page in sorted(DOCS.glob("*.md")) if RUN.search(page.read_text())]


def written(page: str, folder: Path) -> None:
    for match in FILE.finditer((DOCS / page).read_text()):
        (folder / match["name"]).write_text(match["code"])


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path):
    written(page, tmp_path)
    code = "\n".join(match["code"] for match in RUN.finditer((DOCS / page).read_text()))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_a_page_with_code():
    assert "own_estimator.md" in PAGES


@pytest.mark.parametrize("how", ["by its class", "by a file"])
def test_an_estimator_of_somebodys_runs_in_an_experiment(how, tmp_path):
    """As the page says, from the folder that holds it."""
    written("own_estimator.md", tmp_path)
    (tmp_path / "mine" / "estimator").mkdir(parents=True)
    (tmp_path / "mine" / "estimator" / "quest.yaml").write_text("_target_: quest.Quest\npage: 16\n")
    chosen = ["estimator._target_=quest.Quest"] if how == "by its class" else ["estimator=quest", "estimator.page=8"]
    command = [sys.executable, "-m", "experiments.run", "--config-dir", "mine", *chosen, "method=quest", "allocator=uniform"]
    command += ["evaluation.windows=1", "evaluation.context_tokens=64", "graphs.calibration_windows=1", "graphs.chunk_tokens=32"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(DOCS.parent)])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "quest" in done.stdout
