"""The check itself: right on the CPU, and honest about a device that fails, dies or computes something else."""

import sys

import numpy as np
import pytest
import torch

from shadowattn import device_check, isolated
from shadowattn.device_check import CASES, SMALLEST, check_device, run_case
from shadowattn.graphs.cpu import multiplies_exactly


def dying(folder, *, after: int = 0, how: str = "os.abort()") -> str:
    """An interpreter that answers for the first `after` cases and then dies."""
    script = folder / "python"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"for given in sys.argv[4:][:{after}]:\n"
        "    print(json.dumps(dict(case=json.loads(given)['case'], recall=1.0)), flush=True)\n"
        f"if len(sys.argv[4:]) > {after}: {how}\n"
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize("case", [case for case in CASES if "long" not in case and "launch" not in case])
def test_every_form_is_exact_on_the_cpu(case):
    outcome = run_case("CPU", case, CASES[case])
    assert outcome.error == ""
    assert outcome.exact == 1
    ties = CASES[case][1].score_dtype in (np.int8, np.float16)  # 256 steps, or 11 bits, make them
    assert outcome.recall == 1 or (ties and outcome.recall > 0.98)
    assert outcome.int8 == multiplies_exactly()
    assert outcome.p95_ms >= outcome.median_ms > 0


def test_a_device_that_is_not_there_says_so():
    outcome = run_case("XPU", "smallest", SMALLEST)
    assert "XPU" in outcome.error
    assert outcome.compile_s != outcome.compile_s  # NaN: nothing was measured


def test_a_case_that_kills_the_process_is_reported_and_the_rest_run(monkeypatch, tmp_path):
    monkeypatch.setattr(device_check.sys, "executable", dying(tmp_path, after=1))
    cases = ["smallest", "static", "static, mask", "runtime scales"]
    outcomes = check_device("CPU", {case: CASES[case] for case in cases})
    assert [o.case for o in outcomes] == cases
    assert [bool(o.error) for o in outcomes] == [False, True, False, True]
    assert "ended with status -6" in outcomes[1].error


def test_a_device_that_hangs_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(isolated, "TIMEOUT_S", 1)
    monkeypatch.setattr(device_check.sys, "executable", dying(tmp_path, how="import time; time.sleep(60)"))
    assert check_device("CPU", {"smallest": SMALLEST})[0].error == "no answer within 1 s"


def test_wrong_scores_are_found_out():
    shape, form = CASES["static"]
    product = torch.arange(float(shape.heads * shape.rows * shape.keys)).view(shape.heads, shape.rows, shape.keys) % 997
    step = device_check._SCALE**2
    right = (product * step).float()
    assert device_check._compare(right, product, shape, form) == (0.0, 1.0, 1.0)
    steps_off, exact, recall = device_check._compare(-right, product, shape, form)
    assert steps_off == 2 * 996
    assert exact < 0.01
    assert recall < 0.5


def test_float16_scores_are_allowed_their_rounding_and_no_more():
    shape, form = CASES["int8, float16 scores"]
    product = torch.arange(float(shape.heads * shape.rows * shape.keys)).view(shape.heads, shape.rows, shape.keys) % 9973
    rounded = (product / form.score_steps).half().float()
    steps_off, exact, recall = device_check._compare(rounded, product.double(), shape, form)
    assert (steps_off, exact) == (0, 1)
    assert recall > 0.98
    assert device_check._compare(rounded * 1.01, product.double(), shape, form)[0] > 0
