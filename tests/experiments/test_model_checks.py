from dataclasses import replace

import pandas as pd
import pytest
import torch
from rich.console import Console

from experiments.publish import ROOT
from experiments.reference_model.abilities import Checks, Samples, context_losses, heldout_windows, token_losses
from experiments.studies.reference_model import TARGETS, ReferenceModel, measured_intervals
from shadowattn.data.text import stdlib_corpus
from shadowattn.errors import InputError
from shadowattn.evaluation.intervals import Interval
from shadowattn.models import LoadedModel, load_bundled
from shadowattn.reporting.figures.loss_by_position import draw
from shadowattn.reporting.style import save


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    return load_bundled()


def _rows(intervals: dict[str, Interval]) -> pd.DataFrame:
    lines = [
        {"metric": f"{name}{end}", "value": value, "n": measured.n}
        for name, measured in intervals.items()
        for end, value in (("", measured.value), ("_low", measured.low), ("_high", measured.high))
    ]
    return pd.DataFrame(lines)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_met_where_the_whole_interval_is_on_its_side(name):
    target = TARGETS[name]
    inside, outside = (target.value - 0.001, target.value + 0.001)[:: 1 if target.at_most else -1]
    around = Interval(inside, min(inside, outside), max(inside, outside), 9)
    assert target.verdict(replace(around, low=inside, high=inside)) == "met"
    assert target.verdict(around) == "not shown"
    assert target.verdict(replace(around, low=outside, high=outside)) == "missed"


def test_the_table_says_what_is_met_missed_and_not_shown():
    intervals = {name: Interval(1e9, 1e9, 1e9, 4) for name in TARGETS} | {"context_gain": Interval(0.22, 0.02, 0.42, 48)}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(ReferenceModel().table(_rows(intervals), "checks"))
    printed = capture.get()
    assert printed.count(" met ") == 5
    assert printed.count("missed") == 1  # a loss increase has to be small
    assert "0.020 to 0.420" in next(line for line in printed.splitlines() if "not shown" in line)


def test_accuracies_and_gains_come_with_intervals_over_documents_and_windows():
    checks = Checks([2.0, 4.0], [1.0, 1.0], [3.0, 3.0, 6.0], [2.0, 2.0, 2.0], 60, 60, 0, 20)
    assert checks.copy_gain.value == pytest.approx((0.5 + 0.75) / 2)
    assert (checks.context_gain.value, checks.context_gain.n) == (2.0, 3)
    assert checks.context_gain.low < 0 < checks.context_gain.high
    assert checks.key_value_accuracy.n == 60
    assert TARGETS["key_value_accuracy"].verdict(checks.key_value_accuracy) == "not shown"  # 60 of 60 may still be 94 %
    assert TARGETS["needle_accuracy"].verdict(checks.needle_accuracy) == "missed"
    assert set(checks.means()) >= {"early_text_loss", "needle_accuracy"}


def test_context_is_measured_on_the_same_tokens(bundled):
    heldout, samples = stdlib_corpus().heldout, Samples(text_rows=2, text_tokens=256)
    early, late = context_losses(bundled.model, bundled.tokenizer, heldout, samples)
    for window, short, long in zip(heldout_windows(bundled.tokenizer, heldout, samples), early, late, strict=True):
        whole = token_losses(bundled.model, window[None])[0]
        assert long == pytest.approx(whole[127:].mean().item(), abs=1e-5)
        # A token by itself: number 200, after the 72 before it that its piece of 128 holds.
        pieces = [token_losses(bundled.model, window[start : start + 128][None])[0, 63:] for start in (64, 128)]
        assert short == pytest.approx(torch.cat(pieces).mean().item(), abs=1e-5)
    # After 64 to 128 tokens both times, there is nothing to gain.
    early, late = context_losses(bundled.model, bundled.tokenizer, heldout, replace(samples, text_tokens=128))
    assert early == pytest.approx(late, abs=1e-5)
    with pytest.raises(InputError, match="multiple of 128"):
        heldout_windows(bundled.tokenizer, heldout, replace(samples, text_tokens=200))


def test_held_out_windows_never_overlap(bundled):
    text = "".join(f"name_{number} = {number}\n" for number in range(400))
    windows = heldout_windows(bundled.tokenizer, text, Samples(text_rows=1000, text_tokens=128))
    assert len(windows) == len(bundled.tokenizer(text, verbose=False).input_ids) // 128


def test_the_committed_rows_say_which_targets_are_met(tmp_path):
    rows = pd.read_csv(ROOT / "results" / "reference" / "model_checks.csv", keep_default_na=False)
    measured = measured_intervals(rows)
    verdicts = {name: target.verdict(measured[name]) for name, target in TARGETS.items()}
    assert "missed" not in verdicts.values()
    flags = rows.set_index("metric").flag
    assert {name: flags[name] for name in TARGETS} == {
        name: "" if verdict == "met" else f"target {verdict}" for name, verdict in verdicts.items()
    }
    assert measured["needle_accuracy"].n >= 100
    assert save(draw(rows), tmp_path / "loss.png").stat().st_size > 5_000
