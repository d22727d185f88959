"""Estimates made some layers early."""

import pandas as pd
import pytest
import torch

from shadowattn.evaluation.look_ahead import measure_look_ahead
from shadowattn.models.decoder import read_decoder
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder
from tests.tiny import tiny_model

__all__ = ["run", "tiny_folder"]


def test_layers_that_change_nothing_lose_nothing():
    """With output and down projections of zero every layer enters what the first did."""
    model = tiny_model(layers=3)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    window = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(0))
    found = measure_look_ahead(read_decoder(model), window, rows=20, retentions=[0.2], ahead=[1, 2])
    assert found.recall[1, 0.2][1:] == found.mass[1, 0.2][1:] == [[1.0] * 4] * 2
    assert found.recall[2, 0.2][2] == [1.0] * 4
    for table in (found.recall, found.mass):
        assert all(value != value for value in (*table[1, 0.2][0], *table[2, 0.2][0], *table[2, 0.2][1]))


def test_layers_that_change_much_lose_some():
    window = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(0))
    found = measure_look_ahead(read_decoder(tiny_model(layers=3)), window, rows=20, retentions=[0.2, 1.0], ahead=[1])
    assert all(0 < value < 1 for layer in found.recall[1, 0.2][1:] for value in layer)
    assert all(0 < value <= 1 + 1e-5 for layer in found.mass[1, 0.2][1:] for value in layer)
    assert found.recall[1, 1.0][1:] == [[1.0] * 4] * 2  # every key is kept


def test_the_study(run):
    folder = run("study_look_ahead", "+exp=study_look_ahead", "study.ahead=[1]", "study.rows=24", "evaluation.windows=2")
    rows = pd.read_parquet(folder / "rows.parquet")
    assert set(rows.metric) == {"recall", "mass"}
    assert set(rows.layer) == {1}
    assert len(rows) == 2 * 2 * 4
    assert rows.value.between(0, 1 + 1e-6).all()
    assert (folder / "look_ahead.png").is_file()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("study.ahead=[0]", "study.ahead: expected numbers of layers"),
        ("study.ahead=[2]", "study.ahead: expected less than the model's 2 layers"),
        ("study.rows=4000", "study.rows: expected at most the 96 tokens"),
    ],
)
def test_what_there_is_not_is_refused(run, capsys, setting, message):
    with pytest.raises(SystemExit):
        run("study_look_ahead", "+exp=study_look_ahead", "study.ahead=[1]", setting)
    assert message in capsys.readouterr().err
