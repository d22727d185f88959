"""Comparisons of methods: known values, plain definitions, scipy's tests, and what must hold of any losses."""

import itertools
import math
import operator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from shadowattn.evaluation.comparison import LEVEL, compare, holm, sign_flip_p, verdict

losses = st.floats(-5, 5, allow_nan=False).map(lambda x: round(x, 3))
p_values = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def test_known_values_of_a_sign_flip_test():
    """Darwin's maize, 15 pairs (Fisher 1935, section 21): 863 of 32,768 patterns reach the sum of 314 on one side."""
    maize = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert sign_flip_p(maize) == 2 * 863 / 32768


def test_known_values_of_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, 0.02, 0.03]) == pytest.approx([0.03, 0.04, 0.04])  # the third is no less than the second
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.integers(-5000, 5000), min_size=1, max_size=10))
@example([100, 200, -300, 400, -400])
@example([0, 1375, 1875, 1875, 1406, 625, -1438, -1031, -4688])
def test_p_values_count_every_pattern_of_signs(thousandths):
    """By integers, whose sums are exact. Of the second example scipy's permutation test says 0.992, by rounding."""
    sums = [abs(sum(map(operator.mul, signs, thousandths))) for signs in itertools.product((1, -1), repeat=len(thousandths))]
    expected = sum(one >= abs(sum(thousandths)) for one in sums) / len(sums)
    assert sign_flip_p([one / 1000 for one in thousandths]) == expected


def test_drawn_p_values_are_near_the_exact_ones():
    values = np.random.default_rng(3).normal(0.35, 1, 17)
    expected = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=2**17, batch=2**13)
    assert sign_flip_p(values) == pytest.approx(expected.pvalue, abs=0.005)  # three standard errors of 99,999 draws
    assert sign_flip_p(np.ones(40)) == 1e-5  # never 0: the given pattern counts


@given(st.lists(losses, min_size=1, max_size=20), st.floats(0.01, 100))
def test_neither_unit_nor_sign_changes_a_p_value(values, unit):
    p = sign_flip_p(values)
    assert 0 < p <= 1
    assert sign_flip_p([-x for x in values]) == p
    assert sign_flip_p([x * unit for x in values]) == pytest.approx(p)


@given(p_values)
def test_holm_lies_between_uncorrected_and_bonferroni_and_keeps_the_order(values):
    corrected = holm(values)
    for p, q in zip(values, corrected, strict=True):
        assert p <= q <= min(1, p * len(values)) + 1e-15
    assert np.all(np.diff(np.array(corrected)[np.argsort(values, kind="stable")]) >= 0)
    assert holm(values[::-1])[::-1] == corrected


def test_a_false_difference_among_many_comparisons_is_as_rare_as_the_level():
    """Forty comparisons of equal methods, two hundred times over: uncorrected, hardly a study would be without one."""
    random, studies, falsely, uncorrected = np.random.default_rng(0), 200, 0, 0
    for _ in range(studies):
        values = {index: random.normal(size=8) for index in range(10)}
        pairs = [(a, b) for a in values for b in values if a < b][:40]
        corrected = [found.p for found in compare(values, pairs)]
        falsely += min(corrected) <= LEVEL
        uncorrected += min(sign_flip_p(values[a] - values[b]) for a, b in pairs) <= LEVEL
    assert falsely / studies <= LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / studies)
    assert uncorrected / studies > 0.5


def test_a_comparison_is_the_paired_t_interval():
    random = np.random.default_rng(1)
    windows = random.normal(3, 1, 16)
    own, rival = windows + random.normal(0, 0.01, 16), windows + random.normal(0.02, 0.01, 16)
    (found,) = compare({"own": own, "rival": rival}, [("own", "rival")])
    interval = stats.ttest_rel(rival, own).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.difference == pytest.approx((rival - own).mean())
    assert found.error == pytest.approx(stats.sem(rival - own))
    assert found.n == 16
    assert found.p == sign_flip_p(rival - own)  # nothing to correct for
    assert found.difference > 0  # the method has less loss than its rival


def test_all_comparisons_are_corrected_together():
    random = np.random.default_rng(2)
    values = {name: random.normal(size=10) for name in "abcd"}
    pairs = [("a", "b"), ("a", "c"), ("d", "b")]
    expected = holm([sign_flip_p(values[rival] - values[own]) for own, rival in pairs])
    assert [found.p for found in compare(values, pairs)] == expected


def test_equal_methods_and_single_windows_are_no_evidence():
    same, single = compare({0: [1.0, 2.0], 1: [1.0, 2.0]}, [(0, 1)]), compare({0: [1.0], 1: [2.0]}, [(0, 1)])
    assert (same[0].difference, same[0].p) == (0.0, 1.0)
    assert single[0].p == 1.0
    assert math.isnan(single[0].error)
    assert math.isnan(single[0].low)


def test_losses_of_other_windows_are_refused():
    with pytest.raises(ValueError, match="same windows for both methods, got 3 and 2"):
        compare({"own": [1.0, 2.0], "rival": [1.0, 2.0, 3.0]}, [("own", "rival")])


@pytest.mark.parametrize(
    ("difference", "p", "n", "comparisons", "expected"),
    [
        (0.1, 0.05, 16, 28, "better"),
        (-0.1, 0.05, 16, 28, "worse"),
        (0.1, 0.051, 16, 28, "no difference shown"),
        (0.1, 0.5, 10, 28, "too few windows"),  # 28 / 2**9 is above the level
        (0.1, 0.5, 11, 25, "no difference shown"),
        (0.1, 1.0, 4, 1, "too few windows"),
        (0.1, 0.01, 50, 4999, "better"),
    ],
)
def test_verdicts(difference, p, n, comparisons, expected):
    assert verdict(difference, p, n=n, comparisons=comparisons) == expected


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_no_verdict(loss):
    with pytest.raises(ValueError, match="expected finite"):
        compare({"a": [1.0, 2.0, loss, 3.0], "b": [1.0] * 4}, [("a", "b")])
