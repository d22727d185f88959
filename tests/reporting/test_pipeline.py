"""Figures of the pipeline, drawn from the committed rows."""

import pytest

from experiments.publish import ROOT, read_reference
from shadowattn.reporting.figures.fig9 import draw as draw_fig9
from shadowattn.reporting.figures.latency_profile import draw as draw_latency_profile
from shadowattn.reporting.style import save

REFERENCE = ROOT / "results" / "reference"


@pytest.mark.parametrize(("name", "draw"), [("fig9", draw_fig9), ("latency_profile", draw_latency_profile)])
def test_figures_are_drawn_from_the_committed_rows_the_same_way_each_time(name, draw, tmp_path):
    rows = read_reference(REFERENCE / f"{name}.csv")
    assert set(rows.measured) == {"measured"}
    first, second = (save(draw(rows), tmp_path / f"{i}.png").read_bytes() for i in range(2))
    assert first == second
    assert (ROOT / "docs" / f"{name}.png").is_file()


def test_fig9_shows_every_head_of_every_way():
    rows = read_reference(REFERENCE / "fig9.csv")
    spans = rows[rows.metric == "span"]
    assert list(spans.method.unique()) == ["serial", "overlap", "grouped", "planned"]
    for _, of in spans.groupby(["method", "stage"]):
        heads = sorted(int(head) for heads in of.heads.astype(str) for head in heads.split())
        assert heads == list(range(len(heads)))
