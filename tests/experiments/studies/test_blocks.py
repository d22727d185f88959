"""The study of the engine's arithmetic, on a tiny model."""

import pandas as pd
import pytest

from shadowattn.graphs.cpu import multiplies_in_bfloat16
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]

SHORT = ["+exp=study_blocks", "retentions=[0.5]", "engine.calibration_tokens=64", "engine.calibration_windows=1"]
SHORT += ["study.forms.w4.group=32"]


def test_every_form_is_held_to_float32(run):
    without = [] if multiplies_in_bfloat16() else ["~study.forms.bfloat16"]
    folder = run("study_blocks", *SHORT, "evaluation.windows=2", *without)
    rows = pd.read_parquet(folder / "rows.parquet")
    loss = rows[rows.metric == "loss"].set_index(["method", "retention"]).value
    increase = rows[rows.metric == "loss_increase"].set_index(["method", "retention"]).value
    assert len(loss) == 14 - len(without) + 3
    for cell in loss.index:
        assert increase[cell] == pytest.approx(loss[cell] - loss["float32", 1.0])
    assert increase["float32", 1.0] == 0
    assert 0 < abs(increase["w8a8", 1.0]) < 1
    assert abs(increase["w8", 1.0]) < abs(increase["w4", 1.0])
    assert increase["float32", 0.5] != 0
    kept = rows[rows.method == "mlp_in_float32"].iloc[0]
    assert (kept.precision, kept.smooth, kept.floats) == ("w8a8", 0.8, "mlp")
    assert (folder / "blocks.png").is_file()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("study.sparse=[w7]", "study.sparse: expected names of study.forms"),
        ("~study.forms.float32", "study.forms: expected float32: {}"),
        ("study.forms.bfloat16.precision=int8", "engine.precision: expected one of float32"),
        ("study.forms.w8a8.floats=[k]", "engine.floats: expected one of qkv, out, mlp, down"),
        ("study.forms.bfloat16.floats=[qkv]", "rounds no activations"),
    ],
)
def test_forms_that_there_are_not_are_refused(run, capsys, setting, message):
    with pytest.raises(SystemExit):
        run("study_blocks", *SHORT, setting)
    assert message in capsys.readouterr().err


def test_bfloat16_is_refused_before_the_work_where_the_processor_has_no_such_products(run, monkeypatch, capsys):
    monkeypatch.setattr("experiments.studies.blocks.multiplies_in_bfloat16", lambda: False)
    with pytest.raises(SystemExit):
        run("study_blocks", *SHORT)
    said = capsys.readouterr().err
    assert "study.forms.bfloat16: bfloat16 needs a processor with such products" in said
    assert "leave the form out with '~study.forms.bfloat16'" in said
    assert "blocks:" not in said
