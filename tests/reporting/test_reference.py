"""Every committed figure is drawn from committed rows, and rows say what was measured and what simulated."""

import pytest

from experiments.publish import FIGURES, ROOT, read_reference

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


def test_the_best_scheduler_keeps_its_bars():
    """Within 2 % of the optimum on the median work, and planned in a millisecond for 16 heads."""
    rows = read_reference(REFERENCE / "study_schedulers.csv")
    best = rows[rows.method == "local_search"]
    assert best[best.metric == "gap_median"].value.max() <= 0.02
    assert best[(best.metric == "planning_time") & (best.heads == 16)].value.max() < 1000
