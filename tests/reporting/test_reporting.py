import math
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pandas as pd
import pytest
from rich.console import Console

from experiments.publish import read_reference
from shadowattn.evaluation.intervals import share_interval
from shadowattn.reporting.figures.importance import draw as draw_importance
from shadowattn.reporting.figures.layer_errors import draw as draw_layer_errors
from shadowattn.reporting.figures.loss_by_position import draw as draw_loss_by_position
from shadowattn.reporting.figures.octaves import draw as draw_octaves
from shadowattn.reporting.figures.quality import draw as draw_quality
from shadowattn.reporting.figures.retention import draw as draw_retention
from shadowattn.reporting.figures.sweep import draw as draw_sweep
from shadowattn.reporting.flags import difference_flags, flag_lines, quality_flag, unable
from shadowattn.reporting.rows import PlacedRow, QualityRow, Row, write_rows
from shadowattn.reporting.style import new_figure, save
from shadowattn.reporting.tables import summary, summary_table

CONTRACT = {
    *("experiment", "config_hash", "metric", "value", "unit", "method", "model", "retention", "n", "seed"),
    *("path_kind", "estimate_device", "measured"),
}


def rows() -> list[Row]:
    row = Row(
        experiment="test",
        config_hash="0" * 12,
        metric="perplexity",
        value=10.0,
        unit="1",
        method="dense",
        model="tiny",
        retention=1.0,
        n=100,
        seed=0,
        path_kind="quality",
        estimate_device="none",
        measured="measured",
        kernel="torch",
        estimator="none",
        allocator="none",
        query_block=1,
        block_score="none",
        context_tokens=64,
        data="text",
        corpus_sha256="f" * 64,
        flag="",
    )
    cells = [(r, m) for r in (0.1, 0.5) for m in ("int8", "random")]
    return [row] + [
        replace(row, method=method, retention=retention, metric=metric, value=value + retention)
        for retention, method in cells
        for metric, value in (
            ("perplexity", 11),
            ("mass_recall", 0.1),
            ("topk_overlap", 0.2),
            ("output_error", 0.3),
            ("density", 0),
        )
    ]


def test_rows_have_the_contracts_columns(tmp_path):
    frame = write_rows(rows(), tmp_path / "rows.parquet")
    assert set(frame.columns) >= CONTRACT
    assert pd.read_parquet(tmp_path / "rows.parquet").equals(frame)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.parquet"]


def test_a_layer_without_an_error_is_drawn_as_near():
    row = PlacedRow(**vars(rows()[1]))
    found = [replace(row, metric="layer_output_error", value=value, layer=layer) for layer, value in enumerate((0.0, 0.2, 0.4))]
    (image,) = draw_layer_errors(pd.DataFrame([vars(one) for one in found])).axes[0].images
    shades = image.cmap(image.norm(image.get_array()))[0].sum(-1)
    assert shades[0] < shades[1] < shades[2]


def test_a_line_of_octaves_has_a_point_for_each():
    row = QualityRow(**vars(rows()[0]) | {"method": "ours", "retention": 0.05})
    values = {1: 0.5, 16: 0.25, 32: 0.0}
    found = [replace(row, metric="octave_loss_increase", value=value, octave=octave) for octave, value in values.items()]
    found += [replace(row, metric="octave_loss_increase_error", value=0.1, octave=octave) for octave in values]
    (axis,) = draw_octaves(pd.DataFrame([vars(one) for one in found])).axes
    line = axis.get_lines()[0]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == (list(values), list(values.values()))
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1", "16", "32"]


def test_octaves_of_a_single_window_have_no_bars_and_every_retention_a_panel():
    row = QualityRow(**vars(rows()[0]) | {"method": "ours", "octave": 1, "n": 1})
    found = [
        replace(row, metric=metric, method=method, retention=at, value=value)
        for method, at in (("ours", 0.05), ("ours", 0.1), ("ours", 0.2), ("npu_full", 1.0))
        for metric, value in (("octave_loss_increase", 0.5), ("octave_loss_increase_error", math.nan))
    ]
    axes = draw_octaves(pd.DataFrame([vars(one) for one in found])).axes
    assert [axis.get_title() for axis in axes[:4]] == ["0.05 of the keys", "0.1 of the keys", "0.2 of the keys", "every key"]
    assert [axis.get_lines()[0].get_ydata().tolist() for axis in axes[:4]] == [[0.5]] * 4
    assert [axis.axison for axis in axes] == [True] * 4 + [False] * 2


def test_the_summary_is_a_line_for_each_method_and_retention():
    frame = pd.DataFrame([vars(row) for row in rows()])
    lines = summary(frame)
    assert list(zip(lines.method, lines.retention, strict=True)) == [
        ("dense", 1.0),
        ("int8", 0.1),
        ("int8", 0.5),
        ("random", 0.1),
        ("random", 0.5),
    ]
    assert math.isnan(lines.mass_recall[0])
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table(frame, "title"))
    text = console.export_text()
    console.file.close()
    assert "11.100" in text
    assert "–" in text


@pytest.mark.parametrize(
    ("loss", "dense_loss", "error", "expected"),
    [
        (2.1, 2.0, 0.01, ""),
        (2.0 - 1e-7, 2.0, 0.0, ""),
        (1.9, 2.0, 0.03, "sparse beats dense"),  # Student's interval of 5 windows reaches 2.78 standard errors
        (1.9, 2.0, 0.04, "no difference can be shown"),
        (2.1, 2.0, 0.04, "no difference can be shown"),
        (1.9, 2.0, math.nan, "no difference can be shown"),
        (2.9, 2.8, 0.0, "dense near the floor (unigram perplexity 20.1)"),
    ],
)
def test_flags(loss, dense_loss, error, expected):
    assert quality_flag(loss=loss, dense_loss=dense_loss, floor_loss=3.0, windows=5, increase_error=error) == expected


def test_one_window_shows_no_difference():
    flag = quality_flag(loss=1.9, dense_loss=2.0, floor_loss=3.0, windows=1, increase_error=math.nan)
    assert flag == "no difference can be shown"


def test_both_flags_at_once():
    flag = quality_flag(loss=2.8, dense_loss=2.9, floor_loss=3.0, windows=5, increase_error=0.001)
    assert flag.startswith("sparse beats dense; dense near the floor")


def test_an_estimate_that_finds_too_few_keys_is_flagged():
    def flag(**overlaps: float) -> str:
        return quality_flag(loss=1.1, dense_loss=1.0, floor_loss=3.0, windows=5, increase_error=0.001, **overlaps)

    assert flag(topk_overlap=0.89) == "top-k overlap below 0.90"
    assert flag(topk_overlap=0.90, worst_head_overlap=0.50) == ""
    assert flag(topk_overlap=0.95, worst_head_overlap=0.49) == "top-k overlap of the worst head below 0.50"
    assert flag(topk_overlap=1.0, row_overlap=0.89) == "overlap with rows' own top-k below 0.90"


def test_flags_are_listed_once_with_all_that_they_are_about():
    made = [("a", 0.2, "one"), ("a", 0.5, "one; two"), ("b", 0.2, "two"), ("a", 0.2, "one"), ("c", 1.0, "")]
    flagged = pd.DataFrame(made, columns=["method", "retention", "flag"])
    assert flag_lines(flagged) == ["one: a at 0.2 0.5", "two: a at 0.5, b at 0.2"]
    assert flag_lines(flagged.assign(task="copy"), without=("one",)) == ["two: copy a at 0.5, copy b at 0.2"]
    assert flag_lines(flagged[flagged.method == "c"]) == []


@pytest.mark.parametrize(
    ("change", "low", "high", "expected"),
    [
        (0.1, -0.1, 0.3, ["above dense attention", "no difference can be shown"]),
        (0.2, 0.1, 0.3, ["above dense attention"]),
        (-0.2, -0.3, -0.1, []),
        (0.0, 0.0, 0.0, ["no difference can be shown"]),
        (0.1, float("nan"), float("nan"), ["above dense attention", "no difference can be shown"]),
        (-0.1, float("nan"), float("nan"), ["no difference can be shown"]),
    ],
)
def test_a_difference_is_flagged_where_it_is_above_dense_or_may_be_none(change, low, high, expected):
    assert difference_flags(change, low, high) == expected


def test_a_corrected_test_decides_where_there_is_one():
    assert difference_flags(-0.2, -0.3, -0.1, p=0.06) == ["no difference can be shown"]
    assert difference_flags(0.2, -0.01, 0.3, p=0.04) == ["above dense attention"]


@pytest.mark.parametrize(
    ("hits", "chance", "expected"),
    [
        (0, 0.0, "dense may score below 0.05"),
        (2, 0.0, "dense may score below 0.05"),  # two of 20 may be one of 50
        (3, 0.0, ""),
        (7, 0.25, "dense cannot be told from chance (0.25)"),
        (3, 0.25, "dense cannot be told from chance (0.25)"),
        (15, 0.25, ""),
    ],
)
def test_a_task_that_dense_attention_cannot_do_is_named(hits, chance, expected):
    assert unable(share_interval(hits, 20), chance=chance, least=0.05) == expected


def test_the_summary_has_the_change_of_accuracy_with_its_interval():
    row = replace(rows()[-1], metric="accuracy_change", value=-0.25)
    ends = [replace(row, metric=f"accuracy_change_{end}", value=value) for end, value in (("low", -0.5), ("high", 0.125))]
    frame = pd.DataFrame([vars(one) for one in (*rows(), row, *ends)])
    table = summary_table(frame, "title")
    (column,) = [column for column in table.columns if column.header == "change of accuracy"]
    assert list(column.cells)[-1] == "-0.250 (-0.50 … 0.12, n = 100)"


def placed() -> pd.DataFrame:
    """Rows about layers and heads."""
    row = PlacedRow(**vars(rows()[0]) | {"data": "text"})
    cells = [(layer, head) for layer in range(2) for head in range(3)]
    made = [
        replace(row, metric="retention", method="main", retention=0.2, layer=layer, head=head, value=0.1 * (layer + head))
        for layer, head in cells
    ]
    made += [
        replace(row, metric="loss_increase", method="ablate_zero", layer=layer, head=head, value=0.02 * (layer + head))
        for layer, head in cells
    ]
    made += [replace(row, metric="loss_increase", method="bypass", layer=layer, value=0.5 - layer) for layer in range(2)]
    made += [replace(row, metric=f"loss_at_{at}", value=5 / (1 + at)) for at in range(64)]
    return pd.DataFrame([vars(row) for row in made])


def test_every_figure_is_drawn_and_is_the_same_for_the_same_rows(tmp_path):
    frame = pd.DataFrame([vars(row) for row in rows()])
    jobs = pd.concat([frame.assign(job=f"seed={seed}", value=frame.value + seed) for seed in range(6)])
    draw = {
        "quality": lambda: draw_quality(frame),
        "importance": lambda: draw_importance(placed()),
        "retention": lambda: draw_retention(placed()),
        "position": lambda: draw_loss_by_position(placed()),
        "sweep": lambda: draw_sweep(jobs, "perplexity"),
    }
    for name, function in draw.items():
        first, second = (save(function(), tmp_path / f"{name}{i}.png").read_bytes() for i in (1, 2))
        assert first[:4] == b"\x89PNG"
        assert first == second


@pytest.mark.parametrize("name", ["quickstart", "sweep_retention"])
def test_the_readme_names_the_allocator_of_the_rows(name):
    root = Path(__file__).parents[2]
    frame = read_reference(root / "results" / "reference" / f"{name}.csv")
    (allocator,) = set(frame[frame.method == "shadowattn"].allocator)
    assert f"| `shadowattn` | INT8 estimate | its own, by the allocator `{allocator}` |" in (root / "README.md").read_text()


@pytest.mark.parametrize("name", ["quickstart", "sweep_retention", "study_allocators", "study_query_block"])
def test_quality_is_drawn_from_the_committed_rows(name, tmp_path):
    frame = read_reference(Path(__file__).parents[2] / "results" / "reference" / f"{name}.csv")
    assert set(frame.columns) >= CONTRACT
    assert "dense" in set(frame.method)
    assert save(draw_quality(frame), tmp_path / "quality.png").stat().st_size > 10_000


def test_a_figure_says_at_its_foot_where_its_rows_were_measured(tmp_path):
    drawn, _ = new_figure(columns=1)
    plain = save(drawn, tmp_path / "plain.png")
    said = save(drawn, tmp_path / "said.png", below="a machine, 2 cores")
    above, whole = (matplotlib.image.imread(path) for path in (plain, said))
    assert whole.shape[0] > above.shape[0]
    assert (whole[: len(above)] == above).all()
    assert (whole[len(above) :] < 1).any()  # something is written there
