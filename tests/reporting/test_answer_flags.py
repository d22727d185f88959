"""Which rows of tasks claim nothing, though methods were asked."""

import pandas as pd

from shadowattn.reporting.flags import UNUSED, answer_flags

NOTHING = "dense may score below 0.05: no difference is claimed"


def row(method: str, metric: str, *, task: str = "easy", value: float = 0.5, low: float = 0.3, flag: str = "", tokens: int = 64):
    return {
        "method": method, "metric": metric, "task": task, "value": value, "low": low, "high": 0.9, "n": 20, "flag": flag,
        "tokens": tokens,
    }  # fmt: skip


def test_a_task_that_dense_attention_may_not_do_claims_nothing():
    rows = pd.DataFrame(
        [
            row("dense", "accuracy"),
            row("int8", "accuracy_change", flag="no difference can be shown"),
            row("dense", "accuracy", task="hard", low=0.01),
            row("int8", "accuracy", task="hard"),
            row("int8", "accuracy_change", task="hard", flag="above dense attention"),
            row("int8", "accuracy_change_p", task="hard"),
            row("oracle", "accuracy_change", task="hard", flag=f"{UNUSED}; no difference can be shown"),
            row("int8", "density", task="hard"),
            row("dense", "accuracy", task="hard", low=0.4, tokens=32),
            row("int8", "accuracy_change", task="hard", tokens=32, flag="above dense attention"),
        ]
    )
    expected = ["", "no difference can be shown", NOTHING, NOTHING, NOTHING, "", f"{UNUSED}; {NOTHING}", "", "", ""]
    expected[-1] = "above dense attention"
    assert answer_flags(rows).tolist() == expected
    assert answer_flags(rows.assign(flag=answer_flags(rows))).tolist() == expected


def test_a_task_of_which_no_method_is_asked_keeps_its_flag():
    said = "dense may score below 0.25: no method is asked"
    rows = pd.DataFrame([row("dense", "accuracy", low=0.01, flag=said)])
    assert answer_flags(rows).tolist() == [said]


def test_other_studies_keep_what_they_have():
    rows = pd.DataFrame({"method": ["dense"], "metric": ["loss"], "value": [1.0], "flag": ["x"]})
    assert answer_flags(rows).tolist() == ["x"]
