"""Every committed figure is drawn from committed rows, and rows say what was measured and what simulated."""

import json

import pytest

from experiments.provenance import sidecar
from experiments.publish import FIGURES, ROOT, read_reference
from shadowattn.artifacts import sha256

REFERENCE = ROOT / "results" / "reference"
SIMULATED = {"fig10", "fig15", "table8", "study_scale"}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn_from_committed_rows(name, tmp_path):
    rows = read_reference(REFERENCE / f"{name}.csv")
    assert FIGURES[name](rows, tmp_path / "drawn.png").stat().st_size > 10_000
    assert (ROOT / "docs" / f"{name}.png").is_file()


@pytest.mark.parametrize("path", sorted(REFERENCE.glob("*.csv")), ids=lambda path: path.stem)
def test_rows_have_the_columns_of_every_row(path):
    rows = read_reference(path)
    columns = [
        "experiment",
        "config_hash",
        "metric",
        "value",
        "unit",
        "method",
        "model",
        "retention",
        "n",
        "seed",
        "path_kind",
        "estimate_device",
        "measured",
    ]
    assert set(columns) <= set(rows.columns)
    assert set(rows.measured) <= {"measured", "simulated"}
    if path.stem in SIMULATED:
        assert set(rows.measured) == {"simulated"}


@pytest.mark.parametrize("path", sorted(REFERENCE.glob("*.csv")), ids=lambda path: path.stem)
def test_rows_say_where_they_come_from(path):
    """Command, commit, machine and versions beside every CSV, which is as it was when they were written."""
    assert sidecar(path).is_file(), f"no {sidecar(path).name} beside it; measure again, then: python -m experiments.publish RUN"
    source = json.loads(sidecar(path).read_text())
    assert source["sha256"] == sha256(path)
    assert source["rows"] == len(read_reference(path))
    assert source["command"].startswith("python -m ")
    assert source["commit"]
    assert {"python", "torch", "openvino", "nncf", "transformers", "numpy", "shadowattn"} <= source["versions"].keys()
    assert {"cpu", "cores", "memory_bytes", "system"} <= source["machine"].keys()
    assert {"config_hash", "code", "dirty", "started", "finished"} <= source.keys()


def test_the_best_scheduler_keeps_its_bars():
    """Within 2 % of the optimum on the median work, and planned in a millisecond for 16 heads."""
    rows = read_reference(REFERENCE / "study_schedulers.csv")
    best = rows[rows.method == "local_search"]
    assert best[best.metric == "gap_median"].value.max() <= 0.02
    assert best[(best.metric == "planning_time") & (best.heads == 16)].value.max() < 1000


def test_the_page_says_how_much_faster_block_sparse_attention_is_simulated():
    rows = read_reference(REFERENCE / "fig10.csv")
    latency = rows[rows.metric == "latency"].set_index(["context_tokens", "model", "method"]).value.unstack()
    share = latency["C/G-Block-Sparse"] / latency["ours"]
    assert (share < 1).sum() == 11
    low, high = ([getattr(share[tokens], end)() for end in ("min", "max")] for tokens in (1024, 4096))
    text = f"({low[0]:.2f} to {low[1]:.2f} of the time at 1024 tokens, {high[0]:.2f} to {high[1]:.2f} at 4096)"
    assert text in " ".join((ROOT / "docs" / "simulation.md").read_text().split())


def test_the_page_says_how_many_optima_were_proven():
    rows = read_reference(REFERENCE / "study_schedulers.csv")
    proven = rows[rows.metric == "proven"]
    page = (ROOT / "docs" / "scheduling.md").read_text()
    for (machines, costs), of in proven.groupby(["machines", "costs"]):
        shares = " | ".join(f"{100 * value:.0f}" for value in of.sort_values("heads").value)
        assert f"| {machines}, {costs} | {shares} |" in page
