"""Measured beside predicted: the same cases, the right platform, and the launch cost of a line that was put in."""

import pandas as pd
import pytest

from shadowattn.reporting.npu_predictions import Compared, compared, comparison, launch_cost

COMPILED = pd.DataFrame(
    {
        "part": ["form", "form", "form", "bank"],
        "platform": ["4000", "4000", "3720", "4000"],
        "method": ["static", "fails", "static", "static"],
        "value": [50.0, float("nan"), 90.0, 7.0],
        "unpriced": ["Convert", "", "", ""],
    }
)


def test_cases_are_those_of_the_platform_that_compiled_and_ran():
    cases = compared({"static": 0.25, "fails": 0.3, "unknown": 0.1}, COMPILED, "NPU4000")
    assert cases == [Compared("static", 250.0, 50.0, "Convert")]
    assert compared({"static": float("nan")}, COMPILED, "4000") == []
    assert compared({"static": 0.1}, COMPILED, "3720")[0].predicted_us == 90


def test_the_launch_cost_is_that_of_the_line_through_priced_cases():
    cases = [Compared(str(us), 120 + 2 * us, us, "") for us in (10.0, 40.0, 100.0)]
    outlier = Compared("TopK", 1e6, 20.0, "TopK")
    assert launch_cost([*cases, outlier]) == pytest.approx((120, 2))
    assert launch_cost(cases[:2]) is None
    assert "measured ≈ 120 µs a launch + 2.00 × predicted" in "\n".join(comparison(cases, "4000"))


def test_without_rows_of_the_platform_it_says_so():
    assert "No compiled rows of NPU 6000" in comparison([], "6000")[0]
