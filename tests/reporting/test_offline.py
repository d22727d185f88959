"""Figures and sentences of the offline stage."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.publish import read_reference
from shadowattn.reporting import offline_figures, verdicts
from shadowattn.types import Importance, ScaleGrid

REFERENCE = Path(__file__).parents[2] / "results" / "reference"


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
    }
    return pd.DataFrame(rows).assign(**shared)


def placed() -> pd.DataFrame:
    rows = [
        {"metric": metric, "layer": layer, "head": head, "retention": retention, "value": 0.1 * (layer + head) + retention}
        for layer in range(2)
        for head in range(2)
        for metric, retention in (("loss_increase", 1.0), ("sensitivity_loss", 0.1), ("sensitivity_loss", 1.0))
    ]
    return pd.DataFrame(rows)


def test_every_figure_is_drawn_and_is_the_same_for_the_same_rows(tmp_path):
    importance = Importance(((12.0, 11.0), (13.0, 10.5)), (30.0, 20.0), 10.0, "zero", 100)
    pairs = [(layer, head, 0.1 * (layer + 1), 0.2 * (head + 1)) for layer in range(2) for head in range(2)]
    frame = study({"even": ("uniform", [0.2, 0.1]), "first": ("first_layers_dense", [0.3, 0.2])}, 0.01)
    draw = {
        "fig6": lambda path: offline_figures.fig6(importance, path),
        "fig7": lambda path: offline_figures.fig7(pairs, ScaleGrid((0.1,), (0.2,)), path),
        "need": lambda path: offline_figures.need(placed(), path),
        "maps": lambda path: offline_figures.retention_maps({str(i): [[0.2, 1.0]] for i in range(4)}, path),
        "one map": lambda path: offline_figures.retention_maps({"a": [[0.2, 1.0]]}, path),
        "allocators": lambda path: offline_figures.allocators(frame, path),
        "no task": lambda path: offline_figures.allocators(frame[frame.metric != "accuracy"], path),
    }
    for name, function in draw.items():
        first, second = (function(tmp_path / f"{name}{i}.png").read_bytes() for i in (1, 2))
        assert first[:4] == b"\x89PNG"
        assert first == second


def test_the_verdict_counts_what_is_better_by_more_than_two_errors():
    frame = study({"greedy": ("error_greedy", [0.1, 0.1, 0.1]), "even": ("uniform", [0.2, 0.1, 0.0])}, 0.01)
    common = {"method": "greedy", "allocator": "error_greedy"}
    gains = [
        common | {"metric": f"gain_over_even{end}", "retention": retention, "value": value}
        for retention, gain, error in ((0.1, 0.1, 0.01), (0.2, 0.015, 0.01), (0.3, -0.1, 0.01))
        for end, value in (("", gain), ("_error", error))
    ]
    said = verdicts.head_budgets(pd.concat([frame, pd.DataFrame(gains)]))
    assert "greedy against even: better at 1, worse at 1 of 3 (gain in nat at 0.1: +0.1000 ± 0.0100" in said


@pytest.mark.parametrize("name", ["study_allocators", "offline"])
def test_the_committed_rows_redraw(name, tmp_path):
    frame = read_reference(REFERENCE / f"{name}.csv")
    draw = {"study_allocators": offline_figures.allocators, "offline": offline_figures.need}[name]
    assert draw(frame, tmp_path / "figure.png").stat().st_size > 10_000
    if name == "study_allocators":
        assert "error_greedy against uniform: better at" in verdicts.head_budgets(frame)
