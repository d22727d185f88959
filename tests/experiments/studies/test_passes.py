"""The study of what passes over a decoder's graph buy, tiny."""

import pandas as pd
import pytest

from experiments.studies import passes
from experiments.studies.passes import FORMS
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]

SHORT = ["study.vocabularies=[2560]", "study.layers=1", "study.hidden=64", "study.tokens=16", "study.rounds=2"]


def test_every_form_is_timed_and_weighed(run, monkeypatch, capsys):
    """In this process: a process of its own runs the same functions."""
    monkeypatch.setattr(passes, "in_own_process", lambda measure, *of: measure(*of))
    folder = run("study_passes", "+exp=study_passes", *SHORT)
    rows = pd.read_parquet(folder / "rows.parquet")
    assert set(zip(rows.method, rows.vocabulary, strict=True)) == {(form, size) for form in FORMS for size in (2560,)}
    assert set(rows.metric) == {"first_token", "next_token", "peak_bytes"}
    times = rows[rows.metric != "peak_bytes"]
    assert (times.value > 0).all()
    assert (times.low <= times.value).all()
    assert set(times.n) == {2}
    assert (rows.path_kind == "timing").all()
    assert (folder / "passes.png").is_file()
    assert "last token, stateful" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("study.shape=gpt5", "study.shape: expected one of smollm2"),
        ("study.vocabularies=[]", "study.vocabularies: expected at least one"),
        ("study.vocabularies=[0]", "study.vocabularies: expected at least 1"),
        ("study.tokens=0", "study.tokens: expected at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(run, capsys, setting, message):
    with pytest.raises(SystemExit):
        run("study_passes", "+exp=study_passes", *SHORT, setting)
    assert message in capsys.readouterr().err
