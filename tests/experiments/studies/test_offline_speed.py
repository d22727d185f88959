"""The study of what an importance profile costs: tiny, from the command line; what it adds up; what it refuses."""

import json

import numpy as np
import pandas as pd
import pytest

from experiments.provenance import sidecar
from experiments.publish import ROOT, read_reference, study_of
from experiments.studies import offline_speed
from experiments.studies.offline_speed import CANDIDATES, LOSS_TOLERANCE, OfflineSpeed, summarise
from shadowattn.models import load_bundled, model_shape
from shadowattn.offline.work import plan
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]  # fixtures

FEW = ["study.windows=2", "study.window_tokens=32", "study.batch=2", "study.rounds=3", "study.slice_layers=1"]


def given(folder) -> list[str]:
    return ["model=local", f"model.path={folder}", "data=text", f"data.path={folder / 'text.txt'}", *FEW]


def test_every_way_to_measure_importance_is_timed(run, tiny_folder, monkeypatch, capsys):
    """The peaks in this process: a process of their own is the same function."""
    peaks = []
    monkeypatch.setattr(offline_speed, "in_own_process", lambda measure, *of: peaks.append(of) or measure(*of))
    folder = run("offline_speed", "+exp=offline_speed", *given(tiny_folder))
    rows = pd.read_parquet(folder / "rows.parquet")
    assert set(rows.method) == set(CANDIDATES)
    assert set(rows.path_kind) == {"timing"}
    assert set(rows.context_tokens) == {32}
    values = rows.set_index(["metric", "method"])
    seconds = values.loc["seconds"]
    assert (seconds.value > 0).all()
    assert (seconds.low <= seconds.value).all()
    assert set(seconds.n) == {3}
    assert values.value["times_faster", "plain"] == 1
    assert values.value["difference", "plain"] == 0
    assert values.value["difference"].max() <= LOSS_TOLERANCE
    assert set(values.loc["difference"].n) == {2 * (4 + 1) + 1}  # heads, layers and the whole model
    assert [of[0] for of in peaks] == list(CANDIDATES)
    assert "losses equal to 1e-05 relative" in capsys.readouterr().out
    assert {path.stem for path in (folder / "slices").glob("?.json")} == {"0", "1"}


def test_what_is_done_is_not_measured_again(run, tiny_folder, monkeypatch):
    monkeypatch.setattr(offline_speed, "in_own_process", lambda *of: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("offline_speed", "+exp=offline_speed", *given(tiny_folder))
    monkeypatch.setattr(offline_speed, "in_own_process", lambda *of: 7)
    monkeypatch.setattr(OfflineSpeed, "time_slice", lambda *of: 1 / 0)
    rows = pd.read_parquet(run("offline_speed", "+exp=offline_speed", *given(tiny_folder)) / "rows.parquet")
    assert set(rows[rows.metric == "peak_bytes"].value) == {7}


def test_slices_are_the_whole_profile_once():
    loaded, study = load_bundled(), OfflineSpeed(slice_layers=3)
    slices = study.slices(loaded)
    assert [piece for part in slices for piece in part] == plan(model_shape(loaded.model), study.batch)
    layers = model_shape(loaded.model).layers
    assert len(slices) == -(-layers // 3)
    assert layers in {piece.layer for piece in slices[-1]}


def test_slices_add_up_round_by_round():
    seconds = {"plain": [4.0, 2.0], "shared, torch": [2.0, 1.0], "shared": [1.0, 1.0]}
    total, faster = summarise([{"seconds": seconds}, {"seconds": seconds}])["shared"]
    np.testing.assert_array_equal(total, [2, 2])
    np.testing.assert_array_equal(faster, [4, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study.rounds=0"], "study.rounds: expected at least 1, got 0"),
        (["study.slice_layers=0"], "study.slice_layers: expected at least 1"),
        (["study.window_tokens=1000000"], "study.window_tokens: the model's context is"),
        (["importance=racing"], "importance: offline_speed does not use it"),
    ],
)
def test_wrong_settings_are_refused(run, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run("offline_speed", "+exp=offline_speed", *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["offline_speed", "offline_speed_qwen2_0_5b"])
def test_the_study_prints_its_committed_rows(name):
    path = ROOT / "results" / "reference" / f"{name}.csv"
    rows = read_reference(path)
    assert rows.value.notna().all()
    table, *targets = study_of(json.loads(sidecar(path).read_text())).table(rows, name).renderables
    assert list(table.columns[0].cells) == list(CANDIDATES)
    of = rows.set_index(["method", "metric"]).value
    met = [
        of["shared", "times_faster"] >= 1.8,
        of["shared", "peak_bytes"] <= of["plain", "peak_bytes"],
        of["shared", "difference"] <= 1e-5,
    ]
    assert [target.startswith("met: ") for target in targets] == met
    assert met[2]  # times and memory are a machine's, the losses are not
