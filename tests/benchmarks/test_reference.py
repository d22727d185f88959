"""The committed rows of the attention benchmark: whole, and its figures can be drawn from them."""

import pandas as pd
import pytest

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
