import sys
from pathlib import Path

import pytest

from experiments import reallocate
from shadowattn.offline import allocate
from shadowattn.offline.artifact_files import read_retention, write_importance, write_measurements
from shadowattn.types import Importance

MEASURED = Importance(((12.0, 11.1), (13.0, 10.5)), (30.0, 12.0), 10.0, "uniform", 256)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_measurements(MEASURED, tmp_path / "measurements.json", model="m", calibration={})
    write_importance(MEASURED, tmp_path / "heads.txt", tmp_path / "layers.txt", model="m")
    return tmp_path


def run(monkeypatch, folder: Path, *arguments: str) -> None:
    names = [str(folder / a) if a.endswith((".txt", ".json")) else a for a in arguments]
    monkeypatch.setattr(sys, "argv", ["reallocate", *names])
    reallocate.main()


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        (["measurements.json", "out.txt"], "artifact"),
        (["measurements.json", "out.txt", "--method", "waterfill"], "waterfill"),
        (["heads.txt", "layers.txt", "out.txt"], "artifact"),
        (["heads.txt", "layers.txt", "out.txt", "--method", "waterfill", "--base-ppl", "10"], "waterfill"),
    ],
)
def test_files_in_a_retention_out_bit_for_bit(arguments, method, folder, monkeypatch, capsys):
    run(monkeypatch, folder, *arguments, "--retention", "0.4")
    expected = allocate(MEASURED.head_ppl, MEASURED.layer_ppl, base_ppl=10.0, retention=0.4, method=method)
    assert [list(layer) for layer in read_retention(folder / "out.txt")] == expected
    assert "mean 0.4 over 2 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["heads.txt", "layers.txt", "out.txt", "--method", "paper"], "--base-ppl"),
        (["out.txt"], "got 1 files"),
        (["none.json", "out.txt"], "cannot be read"),
        (["measurements.json", "out.txt", "--retention", "2"], "(0, 1]"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, folder, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, folder, *arguments)
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (folder / "out.txt").exists()


def test_every_allocator_that_importance_is_enough_for_can_be_chosen():
    assert set(reallocate.METHODS) == {"artifact", "paper", "waterfill", "uniform", "first_layers_dense"}
