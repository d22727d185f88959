"""Every notebook is a pair: the script that is read and edited, and the notebook that is run."""

from pathlib import Path

import jupytext
import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(NOTEBOOKS.glob("*.py"))


def test_there_are_three():
    assert [path.stem for path in SCRIPTS] == ["attach_and_calibrate", "one_head", "own_estimator"]
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {path.stem for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_and_notebook_say_the_same(script):
    """After an edit: jupytext --sync notebooks/*.py"""
    cells = [
        [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells] for path in (script, script.with_suffix(".ipynb"))
    ]
    assert cells[0] == cells[1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_committed_notebook_holds_no_output_of_somebodys_machine(script):
    notebook = jupytext.read(script.with_suffix(".ipynb"))
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
