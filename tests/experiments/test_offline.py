"""The offline command, as a user meets it: in shards, killed, resumed, and its files used elsewhere."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest

from experiments.studies.offline import _signal_rows
from shadowattn.offline import load_profile
from shadowattn.offline.artifact_files import read_measurements, read_retention
from shadowattn.reporting.rows import PlacedRow
from tests.experiments.test_run import ROOT, SMALL, run, tiny_folder

__all__ = ["tiny_folder"]


def arguments(folder: Path, results: Path) -> list[str]:
    return [
        *("+exp=offline", "model=local", f"model.path={folder}", "data=text", f"data.path={folder / 'text.txt'}"),
        *(
            *SMALL,
            "importance.windows=3",
            "sensitivity.windows=1",
            "sensitivity.retentions=[0.1,0.5]",
            "retentions=[0.1,0.3]",
            f"paths.results={results}",
        ),
    ]


@pytest.fixture(scope="module")
def finished(tiny_folder, tmp_path_factory):
    results = tmp_path_factory.mktemp("whole")
    return run(*arguments(tiny_folder, results)), results


def result_folder(results: Path) -> Path:
    (folder,) = (results / "runs" / "offline").iterdir()
    return folder


def test_it_leaves_rows_profiles_figures_and_the_artifacts_files(finished):
    done, results = finished
    assert done.returncode == 0, done.stderr
    assert "Spearman" in done.stdout
    folder = result_folder(results)
    assert {p.name for p in folder.glob("*.png")} == {"importance.png", "fig6.png", "fig7.png", "retention.png", "need.png"}
    rows = pd.read_parquet(folder / "rows.parquet")
    ranked = rows[rows.metric == "need_rank_correlation"]
    signals = {"ablation", "effective_keys", "sensitivity_error", "sensitivity_divergence"}
    assert set(zip(ranked.method, ranked.retention, strict=True)) == {(name, at) for name in signals for at in (0.1, 0.5)}
    assert ranked.value.abs().max() <= 1
    heads = rows[(rows.metric == "loss_increase") & (rows["head"] >= 0)]
    layers = rows[(rows.metric == "loss_increase") & (rows["head"] < 0)]
    assert (len(heads), len(layers)) == (2 * 4, 2)
    allocators = {"main", "uniform", "paper", "artifact", "first_layers_dense", "error_greedy"}
    allocators |= {"error_greedy_loss", "error_greedy_error"}
    means = rows[rows.metric == "mean_retention"].set_index(["method", "retention"]).value
    assert set(means.index) == {(name, retention) for name in allocators for retention in (0.1, 0.3)}
    for name in ("main", "uniform", "first_layers_dense", "error_greedy"):
        assert means[name, 0.1] == pytest.approx(0.1)
    assert set(rows[rows.metric == "q_clipped_heads"].method) >= {"grid", "mean_per_layer", "quantile", "quantile_per_layer"}
    profile = load_profile(folder / "profiles" / "artifact@0.3.json")
    assert read_retention(folder / "artifact" / "head-retention.artifact@0.3.txt") == profile.retention
    measured = read_measurements(folder / "artifact" / "measurements.json")
    assert [len(layer) for layer in measured.head_ppl] == [4, 4]
    assert json.loads((folder / "artifact" / "measurements.json").read_text())["calibration"]["context_length"] == 32


def test_an_exported_retention_runs_as_an_allocator_of_its_own(finished, tiny_folder, tmp_path):
    path = result_folder(finished[1]) / "artifact" / "head-retention.main@0.3.txt"
    common = [a for a in arguments(tiny_folder, tmp_path) if not a.startswith(("+exp", "retentions"))]
    done = run(*common, "allocator=file", f"allocator.path={path}", "retention=0.3", "estimator=oracle")
    assert done.returncode == 0, done.stderr
    assert "importance:" not in done.stderr  # nothing is ablated for an allocator that does not ask
    rows = pd.read_parquet(next((tmp_path / "runs" / "default").iterdir()) / "rows.parquet")
    assert set(rows.allocator) == {"none", "file", "all"}
    assert rows[rows.metric == "mean_retention"].value.item() == pytest.approx(0.3)
    assert "retention: oracle, file: mean 0.3, over sparse layers" in done.stderr


def test_shards_and_kills_at_any_moment_end_in_the_same_numbers(finished, tiny_folder, tmp_path):
    """Two shards, one of them killed again and again at random, then the command without shards."""
    command = arguments(tiny_folder, tmp_path)
    rng, kills = random.Random(0), 0
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.run", *command, "shard.index=0", "shard.count=2"],
            cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        units = tmp_path / "artifacts"
        deadline = time.monotonic() + 60
        before = len(list(units.rglob("L*.json")))
        while len(list(units.rglob("L*.json"))) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.03)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not kills or process.returncode == 0:
            break
    assert kills
    other = run(*command, "shard.index=1", "shard.count=2")
    assert other.returncode == 0, other.stderr
    done = run(*command)
    assert done.returncode == 0, done.stderr
    files = [result_folder(results) / "rows.parquet" for results in (tmp_path, finished[1])]
    pd.testing.assert_frame_equal(*map(pd.read_parquet, files), check_exact=True)


def test_a_shard_alone_says_what_is_left(tiny_folder, tmp_path):
    done = run(*arguments(tiny_folder, tmp_path), "shard.index=1", "shard.count=3")
    assert done.returncode == 0, done.stderr
    assert "shard 1 of 3 has done its share" in done.stderr
    # Not removed, as what came to nothing is: other shards may have begun to write into it.
    assert {path.name for path in result_folder(tmp_path).iterdir()} == {"begun.json", "code.json"}


@pytest.mark.parametrize(
    "settings",
    [
        ["importance=artifact", "importance.windows=3", "importance.batch=2", "importance.activation_scales=observe"],
        ["importance=racing", "importance.windows=6", "importance.race.first=2"],
    ],
)
def test_other_ways_to_measure_importance_run(settings, tiny_folder, tmp_path):
    common = [a for a in arguments(tiny_folder, tmp_path) if not a.startswith(("+exp", "importance.windows"))]
    done = run("+exp=offline", *settings, *common)
    assert done.returncode == 0, done.stderr
    rows = pd.read_parquet(result_folder(tmp_path) / "rows.parquet")
    assert (rows[rows.metric == "perplexity"].value > 1).all()
    (stage,) = (tmp_path / "artifacts").glob("importance-*")
    assert bool(list(stage.glob("units-*/activation_scales.json"))) == ("importance=artifact" in settings)


def test_signals_are_ranked_against_the_need_of_heads():
    """Error in the order of need, ablation in the reverse, one retention apart from the other."""
    need = {0.1: [0.4, 0.1, 0.3, 0.2], 0.5: [0.1, 0.2, 0.3, 0.4]}
    rows = [
        {"metric": metric, "layer": 0, "head": head, "retention": at, "value": value}
        for at, values in need.items()
        for head, loss in enumerate(values)
        for metric, value in (("sensitivity_loss", loss), ("sensitivity_error", loss**3))
    ]
    rows += [{"metric": "loss_increase", "layer": 0, "head": h, "retention": 1.0, "value": -x} for h, x in enumerate(need[0.1])]
    row = PlacedRow(**dict.fromkeys((field.name for field in fields(PlacedRow)), 0))
    found = {(one.method, one.retention): one.value for one in _signal_rows(row, pd.DataFrame(rows))}
    assert found["sensitivity_error", 0.1] == found["sensitivity_error", 0.5] == pytest.approx(1)
    assert found["ablation", 0.1] == pytest.approx(-1)
    assert found["ablation", 0.5] == pytest.approx(0.4)
