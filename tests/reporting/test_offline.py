"""Figures and sentences of the offline stage."""

import io

import pandas as pd
from rich.console import Console

from shadowattn.reporting import verdicts
from shadowattn.reporting.figures.allocators import draw as draw_allocators
from shadowattn.reporting.figures.fig6 import draw as draw_fig6
from shadowattn.reporting.figures.fig7 import draw as draw_fig7
from shadowattn.reporting.figures.need import draw as draw_need
from shadowattn.reporting.style import save


def study(costs: dict[str, tuple[str, list[float]]], errors: float) -> pd.DataFrame:
    """Rows of allocators with the given loss increases at retentions 0.1, 0.2, …"""
    rows = [{"metric": "accuracy", "method": "dense", "allocator": "none", "retention": 1.0, "value": 1.0}]
    for method, (allocator, values) in costs.items():
        for index, value in enumerate(values):
            common = {"method": method, "allocator": allocator, "retention": 0.1 * (index + 1)}
            rows += [
                common | {"metric": "loss_increase", "value": value},
                common | {"metric": "loss_increase_error", "value": errors},
                common | {"metric": "mass_recall", "value": 0.5},
                common | {"metric": "accuracy", "value": 0.9},
            ]
    shared = {
        "model": "tiny",
        "data": "text",
        "context_tokens": 64,
        "measured": "measured",
        "estimator": "int8",
        "kernel": "torch",
        "unit": "nat",
        "n": 16,
        "flag": "",
    }
    return pd.DataFrame(rows).assign(**shared)


def placed() -> pd.DataFrame:
    rows = [
        {"metric": metric, "layer": layer, "head": head, "retention": retention, "value": 0.1 * (layer + head) + retention}
        for layer in range(2)
        for head in range(2)
        for metric, retention in (("loss_increase", 1.0), ("sensitivity_loss", 0.1), ("sensitivity_loss", 1.0))
    ]
    rows += [{**row, "metric": "sensitivity_divergence", "value": 2 * row["value"]} for row in rows if row["retention"] == 0.1]
    rows += [{"metric": "perplexity", "layer": -1, "head": -1, "method": "dense", "value": 10.0}]
    for layer in range(2):
        rows += [{"metric": "perplexity", "layer": layer, "head": -1, "method": "bypass", "value": 20.0 + layer}]
        for head in range(2):
            at = {"layer": layer, "head": head}
            rows += [at | {"metric": "perplexity", "method": "ablate_zero", "value": 11.0 + head}]
            rows += [
                at | {"metric": metric, "method": "observed", "value": 0.1 * (1 + layer)} for metric in ("q_scale", "k_scale")
            ]
    rows += [{"metric": metric, "method": "grid", "layer": -1, "head": -1, "value": 0.15} for metric in ("q_scale", "k_scale")]
    return pd.DataFrame(rows).assign(model="tiny", data="text", n=100, measured="measured")


def test_every_figure_is_drawn_and_is_the_same_for_the_same_rows(tmp_path):
    frame = study({"even": ("uniform", [0.2, 0.1]), "first": ("first_layers_dense", [0.3, 0.2])}, 0.01)
    draw = {
        "fig6": lambda: draw_fig6(placed()),
        "fig7": lambda: draw_fig7(placed()),
        "need": lambda: draw_need(placed()),
        "allocators": lambda: draw_allocators(frame),
        "no task": lambda: draw_allocators(frame[frame.metric != "accuracy"]),
    }
    for name, function in draw.items():
        first, second = (save(function(), tmp_path / f"{name}{i}.png").read_bytes() for i in (1, 2))
        assert first[:4] == b"\x89PNG"
        assert first == second


def gain(method: str, rival: str, retention: float, value: float, p: float, *, n: int = 16, flag: str = "") -> list[dict]:
    """The five rows of one comparison."""
    values = {"": value, "_error": 0.001, "_low": value - 0.002, "_high": value + 0.002, "_p": p}
    common = {"method": method, "retention": retention, "n": n, "flag": flag, "estimator": "int8"}
    return [
        common | {"metric": f"gain_over_{rival}{ending}", "value": each, "unit": "1" if ending == "_p" else "nat"}
        for ending, each in values.items()
    ]


def text_of(table) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_the_verdict_counts_what_is_shown_after_correction():
    """An interval away from 0 is not enough: the p-value, corrected over all comparisons, decides."""
    cells = [(0.1, 0.1, 0.01), (0.2, 0.015, 0.2), (0.3, -0.1, 0.01)]
    found = pd.DataFrame([row for at, value, p in cells for row in gain("greedy", "uniform", at, value, p)])
    assert verdicts.gains(found).verdict.tolist() == ["better", "no difference shown", "worse"]
    lines = text_of(verdicts.comparisons(found)).splitlines()
    assert "3 comparisons, n = 16 windows: sign-flip test of paired losses, p Holm-corrected" in lines[0]
    (first,) = (line for line in lines if "greedy" in line)
    assert [part.strip() for part in first.split("│")[1:-1]] == [
        *("greedy", "uniform", "1 of 3", "1 of 3", "0.1", "+0.1000", "+0.0980 … +0.1020", "0.01", "better")
    ]


def test_the_verdict_says_when_there_are_too_few_windows_to_tell():
    found = pd.DataFrame([row for at in (0.1, 0.2) for row in gain("greedy", "uniform", at, 0.1, 0.5, n=4)])
    assert "2 comparisons, n = 4 windows: too few windows" in verdicts.comparisons(found)


def test_the_verdict_repeats_what_its_rows_are_flagged_with():
    found = pd.DataFrame(gain("blocks", "per_row", 0.2, 0.1, 0.01, flag="density +12.1%"))
    assert "better (density +12.1%)" in text_of(verdicts.comparisons(found))


def test_methods_are_compared_by_divergence_where_that_was_measured():
    by_loss = pd.DataFrame(gain("greedy", "uniform", 0.1, 0.1, 0.01))
    by_divergence = pd.DataFrame(gain("greedy", "uniform", 0.1, -0.1, 0.01))
    by_divergence.metric = by_divergence.metric.str.replace("gain_over", "closer_than")
    both = pd.concat([by_loss, by_divergence])
    assert verdicts.gains(both).verdict.tolist() == ["better"]
    assert verdicts.gains(both, "divergence").verdict.tolist() == ["worse"]
    assert [text_of(table).splitlines()[0].split("sign-flip test of ")[1][:13] for table in verdicts.compared(both)] == [
        *("paired losses", "paired diverg")
    ]
    assert len(verdicts.compared(by_loss)) == 1


def test_without_comparisons_there_is_no_verdict():
    assert verdicts.comparisons(study({"even": ("uniform", [0.2])}, 0.01)) == ""


def test_what_is_gained_over_uniform_is_drawn_and_decides_the_picture(tmp_path):
    frame = study({"greedy": ("error_greedy", [0.1, 0.1]), "uniform": ("uniform", [0.2, 0.1])}, 0.01)
    pictures = []
    for p in (0.01, 0.5):
        rows = pd.concat([frame, pd.DataFrame(gain("greedy", "uniform", 0.1, 0.1, p))])
        pictures.append(save(draw_allocators(rows), tmp_path / "drawn.png").read_bytes())
    pictures.append(save(draw_allocators(frame), tmp_path / "drawn.png").read_bytes())
    assert len(set(pictures)) == 3
