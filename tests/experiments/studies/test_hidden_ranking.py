"""The study of lists that are made a layer early, on a tiny model."""

import pandas as pd
import pytest

from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]

SHORT = ["+exp=study_hidden_ranking", "retentions=[0.3]", "study.firsts=[1]", "study.rounds=2", "evaluation.windows=2"]


def test_what_is_lost_and_what_is_hidden(run):
    folder = run("study_hidden_ranking", *SHORT)
    rows = pd.read_parquet(folder / "rows.parquet").set_index(["first_layer", "metric"]).value
    assert rows[1, "loss_increase"] != 0
    assert 0 < rows[1, "waiting"] < rows[1, "ranking"] < rows[1, "prefill"]
    assert 0 < rows[1, "hidden"] < 1
    assert (folder / "hidden_ranking.png").is_file()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["study.firsts=[0]"], "study.firsts: expected numbers of layers, at least 1 each"),
        (["study.firsts=[2]"], "study.firsts: expected less than the model's 2 layers, got 2"),
        (["retentions=[1.0]"], "retentions: expected one below 1"),
        (["engine.look_ahead=1"], "engine.look_ahead: expected null"),
        (["study.rounds=0"], "study.rounds: expected at least 1"),
        (["estimator=h2o"], "study.firsts: expected an estimator that ranks by a prompt's present rows"),
        (["pipeline=serial"], "study.firsts: expected pipeline=batched"),
    ],
)
def test_what_cannot_be_measured_is_refused(run, capsys, settings, message):
    with pytest.raises(SystemExit):
        run("study_hidden_ranking", *SHORT, *settings)
    assert message in capsys.readouterr().err
