"""The committed rows of the attention benchmark: whole, and its figures can be drawn from them."""

import io

import pandas as pd
import pytest
from rich.console import Console

from benchmarks.attention_bars import bars_table
from benchmarks.attention_figures import draw
from experiments.publish import ROOT

PATH = ROOT / "results" / "reference" / "benchmark_attention.csv"


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return pd.read_csv(PATH)


def test_every_figure_is_drawn_from_the_committed_rows(rows, tmp_path):
    names = sorted(path.name for path in draw(rows, tmp_path))
    assert names == ["attention_keys.png", "attention_retention.png", "attention_roofline.png"]
    assert all((ROOT / "docs" / f"benchmark_{name}").is_file() for name in names)


def test_rows_are_measured_and_complete(rows):
    assert set(rows.measured) == {"measured"}
    assert set(rows.part) == {"bars", "gather", "keys", "retention", "decode", "flex", "memory"}
    keyed = rows[["experiment", "config_hash", "metric", "value", "unit", "method", "model", "seed", "path_kind"]]
    assert keyed.notna().all().all()


def test_the_table_of_bars_lists_every_shape_and_what_is_missed(rows):
    console = Console(width=300, file=io.StringIO())
    console.print(bars_table(rows))
    (line,) = (x for x in console.file.getvalue().splitlines() if "total (int8), 32-row blocks" in x)
    cells = [cell.strip() for cell in line.split("│")[3:-1]]
    peaks = rows[(rows.part == "memory") & (rows.method == "total (int8), 32-row blocks, leading_query")].value
    assert len(peaks) == 6
    assert cells == ["≤ 256", *(f"{peak:.3g}" + (" missed" if peak > 256 else "") for peak in peaks)]


def test_a_bar_is_missed_on_the_wrong_side_of_it_alone(rows):
    frame = rows[(rows.model == "qwen2-0.5b") & (rows.dtype == "float32")].copy()
    at = {"attend, per row": ("times faster than sdpa", 2.4), "select": ("share of sdpa", 0.07)}
    for method, (metric, value) in at.items():
        frame.loc[(frame.method == method) & (frame.metric == metric) & (frame.part == "bars"), "value"] = value
    console = Console(width=300, file=io.StringIO())
    console.print(bars_table(frame))
    printed = console.file.getvalue()
    assert "2.4 missed" in printed
    assert "0.07 missed" in printed
    frame.loc[(frame.method == "select") & (frame.metric == "share of sdpa"), "value"] = 0.05
    console.print(bars_table(frame))
    assert "0.05 missed" not in console.file.getvalue()
