"""Every committed figure is drawn from committed rows, and rows say what was measured and what simulated."""

import json

import pandas as pd
import pytest

from experiments.provenance import sidecar
from experiments.publish import ROOT, read_reference, study_of
from shadowattn.artifacts import sha256
from shadowattn.device_check import CASES
from shadowattn.reporting import predictions
from shadowattn.reporting.figures.parameters import draw as draw_parameters
from shadowattn.reporting.rows import MEASURED
from shadowattn.reporting.style import save

REFERENCE = ROOT / "results" / "reference"
SIMULATED = {"fig10", "fig15", "table8", "study_scale", "study_parameters"}
COMPILED = {"npu_compile"}

# Rows from before anything was recorded beside them; their JSON and every table drawn from them say so. Measure them again.
UNRECORDED: set[str] = set()

# The rows of one run of each study.
WRITTEN = {json.loads(sidecar(path).read_text())["study"]["_target_"]: path for path in sorted(REFERENCE.glob("*.csv"))}.values()


@pytest.mark.parametrize("path", sorted(REFERENCE.glob("*.csv")), ids=lambda path: path.stem)
def test_figures_are_drawn_from_committed_rows(path, tmp_path):
    """Every one that the study draws of its own rows draws from those that were committed; the first is in the documentation.

    Of one run of each study they are written to files, too, which takes longest.
    """
    study = study_of(json.loads(sidecar(path).read_text()))
    drawn = study.figures(read_reference(path))
    for name, figure in drawn.items():
        assert any(axis.has_data() for axis in figure.axes)
        if path in WRITTEN:
            assert save(figure, tmp_path / f"{name}.png").stat().st_size > 10_000
    assert (ROOT / "docs" / f"{path.stem}.png").is_file() == bool(drawn)


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
    assert set(rows.measured) <= set(MEASURED)
    assert (set(rows.measured) == {"compiled"}) == (path.stem in COMPILED)
    if path.stem in SIMULATED:
        assert set(rows.measured) == {"simulated"}


@pytest.mark.parametrize("path", sorted(REFERENCE.glob("*.csv")), ids=lambda path: path.stem)
def test_rows_say_where_they_come_from(path):
    """Command, commit, machine and versions beside every CSV, which is as it was when they were written."""
    assert sidecar(path).is_file(), f"no {sidecar(path).name} beside it; measure again, then: python -m experiments.publish RUN"
    source = json.loads(sidecar(path).read_text())
    assert source["sha256"] == sha256(path)
    assert source["rows"] == len(read_reference(path))
    assert source.get("recorded", True) == (path.stem not in UNRECORDED)
    if path.stem in UNRECORDED:
        return
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


def test_the_page_gives_every_statement_as_its_share_of_parameter_sets(tmp_path):
    rows = read_reference(REFERENCE / "study_parameters.csv")
    page = (ROOT / "docs" / "simulation.md").read_text()
    for row in rows[rows.metric == "verdict"].itertuples():
        assert f"| {row.method} | {100 * row.value:.1f} % |" in page
    sets = rows[rows.metric == "fitting_sets"].iloc[0]
    assert f"{sets.value:.0f} of the {sets.n} sets fit" in page
    ratios = rows[rows.metric == "ttft_ratio"]
    assert set(ratios.flag) == {"held out"}
    short = -100 * (ratios.value / ratios.published - 1)
    within = ((ratios.low <= ratios.published) & (ratios.published <= ratios.high)).sum()
    text = f"| {within} of {len(ratios)} | {short.min():.0f} to {short.max():.0f} % too low, median {short.median():.0f} % |"
    assert f"| dense to sparse ratio {text}" in page
    assert "must cost more" not in page
    assert save(draw_parameters(rows), tmp_path / "drawn.png").stat().st_size > 10_000
    assert (ROOT / "docs" / "study_parameters.png").is_file()


def test_the_page_says_how_many_optima_were_proven():
    rows = read_reference(REFERENCE / "study_schedulers.csv")
    proven = rows[rows.metric == "proven"]
    page = (ROOT / "docs" / "scheduling.md").read_text()
    for (machines, costs), of in proven.groupby(["machines", "costs"]):
        shares = " | ".join(f"{100 * value:.0f}" for value in of.sort_values("heads").value)
        assert f"| {machines}, {costs} | {shares} |" in page


def test_a_target_is_held_where_the_whole_interval_is_and_fitted_chunks_do_not_count():
    made = {"metric": "error", "by": "profile", "mode": "serial", "flag": "", "measured": "simulated"}
    rows = pd.DataFrame([made | {"value": value} for value in (-0.02, 0.01, 0.03, 0.12)])
    rows = pd.concat([rows, pd.DataFrame([made | {"value": 5.0, "flag": "fitted on this case"}])])
    passes = [made | {"metric": "turn_error", "value": value} for value in (0.0, 0.035, 0.07)]
    other = [made | {"metric": "turn_error", "value": 1.0, key: "other"} for key in ("by", "mode")]
    rows = pd.concat([rows, pd.DataFrame(passes + other)])
    (one,) = predictions.prediction_errors(rows)
    assert (one.mean, one.worst, one.within, one.chunks) == (pytest.approx(0.035), 0.12, 3, 4)
    assert (one.low, one.high) == (pytest.approx(0.035 - 0.0869, abs=1e-4), pytest.approx(0.035 + 0.0869, abs=1e-4))
    assert one.verdict == "undecided"  # 3.5 % ± 8.7
    (one,) = predictions.prediction_errors(rows.assign(value=rows.value / 2))
    assert one.cells()[-2:] == ("4 of 4", "held")
    (one,) = predictions.prediction_errors(rows.assign(value=rows.value - 0.25))
    assert one.verdict == "missed"


def test_every_form_was_checked_on_the_cpu_and_compiled():
    """Whoever adds a case to the self-check measures it."""
    compiled = read_reference(REFERENCE / "npu_compile.csv")
    assert set(read_reference(REFERENCE / "npu_selfcheck.csv").method) == set(CASES)
    assert set(compiled.method[compiled.part == "form"]) == set(CASES)
