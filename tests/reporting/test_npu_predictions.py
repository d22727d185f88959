"""Measured beside predicted: the same cases, the right platform, and the launch cost of a line that was put in."""

import pandas as pd
import pytest

from shadowattn.reporting.npu_predictions import Compared, LaunchCost, case_name, compared, comparison, launch_cost

_SHAPE = {"heads": 4, "group": 1, "chunk_rows": 128, "context_tokens": 1024, "head_dim": 64, "model": "none", "unpriced": ""}
COMPILED = pd.DataFrame(
    [
        _SHAPE | {"part": "form", "platform": "4000", "method": "static", "value": 50.0, "unpriced": "Convert", "tiles": 0},
        _SHAPE | {"part": "form", "platform": "4000", "method": "fails", "value": float("nan"), "tiles": 0},
        _SHAPE | {"part": "form", "platform": "3720", "method": "static", "value": 90.0, "tiles": 0},
        _SHAPE | {"part": "rows", "platform": "4000", "method": "int8", "value": 7.0, "tiles": 0},
        _SHAPE | {"part": "tiles", "platform": "4000", "method": "int8", "value": 3.0, "tiles": 2},
    ]
)
INT8 = {"heads": 4, "group": 1, "rows": 128, "keys": 1024, "head_dim": 64}


def test_cases_are_those_of_the_platform_that_compiled_and_ran():
    cases = compared({"static": 0.25, "fails": 0.3, "unknown": 0.1}, COMPILED, "NPU4000")
    assert cases == [Compared("static", 250.0, 50.0, "Convert")]
    assert compared({"static": float("nan")}, COMPILED, "4000") == []
    assert compared({"static": 0.1}, COMPILED, "3720")[0].predicted_us == 90


def test_whole_graphs_are_found_by_what_they_are():
    rows, tiles = (case_name(part, "none", "int8", **INT8) for part in ("rows", "tiles"))
    assert rows == "rows: int8, 4 heads × 128 × 1024, D 64"
    assert compared({rows: 0.01, tiles: 0.01}, COMPILED, "4000") == [Compared(rows, 10.0, 7.0, "")]
    of_a_model = case_name("attention", "smollm2", "float16", **(INT8 | {"group": 3}))
    assert of_a_model == "attention of smollm2: float16, 4 heads in groups of 3 × 128 × 1024, D 64"


def test_the_launch_cost_is_that_of_the_line_through_priced_cases():
    cases = [Compared(str(us), 120 + 2 * us, us, "") for us in (10.0, 40.0, 100.0)]
    outlier = Compared("TopK", 1e6, 20.0, "TopK")
    found = launch_cost([*cases, outlier])
    assert found == LaunchCost(pytest.approx(120), pytest.approx(2), pytest.approx(0, abs=1e-9), 3)
    assert "measured ≈ 120 µs a launch + 2.00 × predicted" in "\n".join(comparison(cases, "4000"))
    assert launch_cost([*cases, Compared("off", 240.0, 10.0, "")]).worst > 0.1


def test_no_launch_cost_is_made_up():
    few = [Compared(str(us), 120 + 2 * us, us, "") for us in (10.0, 40.0)]
    assert "at least 3 are needed" in launch_cost(few)
    assert "at least 3 are needed" in launch_cost([Compared(str(n), n, 10.0, "") for n in range(3)])
    falling = [Compared(str(us), 500 - us, us, "") for us in (10.0, 40.0, 100.0)]
    assert launch_cost(falling).startswith("No launch cost")
    assert "No launch cost" in comparison(falling, "4000")[-1]


def test_without_rows_of_the_platform_it_says_so():
    assert "No compiled rows of NPU 6000" in comparison([], "6000")[0]
