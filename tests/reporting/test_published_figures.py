"""What figures of the published rows must show."""

from experiments.publish import ROOT, read_reference
from shadowattn.reporting.figures.allocators import draw as draw_allocators
from shadowattn.reporting.figures.fig10 import draw as draw_fig10
from shadowattn.reporting.figures.quality import draw as draw_quality


def test_dots_are_shown_whole():
    """A bar that crosses zero needs another scale than a logarithm; one method alone has its label beside its dot."""
    rows = read_reference(ROOT / "results" / "reference" / "study_npu_full.csv")
    axes = draw_quality(rows).axes
    assert axes[0].get_xscale() == "symlog"
    alone = next(axis for axis in axes if axis.get_xlabel() == "recall of attention mass")
    assert alone.get_ylim() == (0.5, -0.5)
    assert [text.get_text() for text in alone.get_yticklabels()] == ["int8_uniform"]


def test_no_device_of_an_estimate_is_named_where_none_ran():
    rows = read_reference(ROOT / "results" / "reference" / "quickstart.csv").assign(estimate_device="none")
    assert "INT8 estimate" not in draw_quality(rows).get_suptitle()


def test_an_allocator_has_one_colour_in_every_panel():
    drawn = draw_allocators(read_reference(ROOT / "results" / "reference" / "study_allocators.csv"))
    assert drawn.get_figwidth() < 10
    colours = {}
    for axis in (drawn.axes[0], drawn.axes[2]):
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            line = handle.lines[0] if hasattr(handle, "lines") else handle  # of a method with error bars, or a level
            colours.setdefault(label, set()).add(line.get_color())
    assert all(len(found) == 1 for found in colours.values())
    gains = drawn.axes[3]
    points = [line for line in gains.lines if len(line.get_ydata()) and line.get_marker() not in ("None", "")]
    low, high = gains.get_ylim()
    assert {line.get_color() for line in points} <= set().union(*colours.values())
    assert all(low < min(line.get_ydata()) and max(line.get_ydata()) < high for line in points)


def test_fig_10_counts_its_cases():
    assert "n = 12 cases" in draw_fig10(read_reference(ROOT / "results" / "reference" / "fig10.csv")).get_suptitle()


def test_a_panel_without_values_is_empty():
    rows = read_reference(ROOT / "results" / "reference" / "quickstart.csv")
    assert draw_quality(rows[~rows.metric.isin(("mass_recall", "topk_overlap"))]).axes
