"""The loss of lists beside how fast a chunk with them is."""

import pandas as pd
import pytest

from experiments.page_figures import FIGURES
from experiments.page_tables.common import rows_of
from shadowattn.reporting.figures.loss_against_time import draw
from shadowattn.reporting.verdicts import gains


def times(methods: list[str]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "metric": "times_faster_than_own_dense",
                "method": method,
                "retention": at,
                "context_tokens": length,
                "dtype": dtype,
                "value": 10 * index + length / 1000 + at,
                "model": "tiny",
                "data": "text",
                "threads": 2,
                "kernel": "native",
            }
            for index, method in enumerate(methods)
            for at in (0.1, 0.2)
            for length in (32, 64, 96)
            for dtype in ("float32", "bfloat16")
        ]
    )


def test_a_panel_has_a_line_for_each_way_that_was_timed():
    losses = pd.DataFrame(
        [
            {"method": method, "retention": at, "loss": 1 / (index + 1 + at), "low": 0.2, "high": 2.0}
            for index, method in enumerate(["per_row", "shared_8", "shared_64"])
            for at in (0.1, 0.2)
        ]
    )
    figure = draw(losses, times(["per_row", "hierarchical", "shared_8"]), 128)
    assert "windows of 128 tokens" in figure.get_suptitle()
    axes = figure.axes
    assert len(axes) == 4  # two dtypes at the least and the most keys
    for axis, length in zip(axes, (32, 96, 32, 96), strict=True):
        assert str(length) in axis.get_title()
        labels = axis.get_legend_handles_labels()[1]
        assert labels == ["a list for each row", "a list for 8 rows"]
        first = axis.containers[0].lines[0]
        assert first.get_xdata() == pytest.approx([length / 1000 + at for at in (0.1, 0.2)])
        assert first.get_ydata() == pytest.approx([1 / 1.1, 1 / 1.2])


def test_the_page_s_figure_adds_paired_differences_to_what_single_rows_lose():
    figure, below = FIGURES["loss_against_time_smollm2"]()
    rows = rows_of("study_query_block_smollm2_more")
    losses = rows[(rows.method == "per_row") & (rows.metric == "loss_increase")].set_index("retention").value.sort_index()
    added = gains(rows)
    added = added[(added.method == "probability_32") & (added.rival == "per_row")].set_index("retention").gain.sort_index()
    lines = dict(zip(figure.axes[0].get_legend_handles_labels()[1], figure.axes[0].containers, strict=True))
    assert sorted(lines["a list for each row"].lines[0].get_ydata()) == pytest.approx(sorted(losses))
    assert sorted(lines["a list for 32 rows"].lines[0].get_ydata()) == pytest.approx(sorted(losses - added))
    assert "commit" in below
