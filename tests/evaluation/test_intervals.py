"""Intervals hold the truth about as often as they say."""

import numpy as np
import pytest
from scipy import stats

from shadowattn.errors import InputError
from shadowattn.evaluation.intervals import bootstrap_interval, mean_interval, resampled_largest_to_median, share_interval


def test_the_interval_of_a_mean_is_students():
    values = [1.0, 2.0, 4.0, 7.0]
    found, expected = mean_interval(values), stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.value, found.n) == (3.5, 4)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_the_interval_of_a_mean_holds_the_truth_19_times_of_20():
    draws = np.random.default_rng(0).normal(1.0, 2.0, (2000, 8))
    intervals = [mean_interval(row) for row in draws]
    assert np.mean([one.low <= 1.0 <= one.high for one in intervals]) == pytest.approx(0.95, abs=0.015)


def test_the_bootstrap_comes_near_students_interval_with_many_values_and_is_shorter_with_few():
    draws = np.random.default_rng(0).normal(1.0, 2.0, 400)
    found, students = bootstrap_interval(draws), mean_interval(draws)
    assert (found.value, found.n) == (students.value, 400)
    assert (found.low, found.high) == pytest.approx((students.low, students.high), abs=0.03)
    assert bootstrap_interval(draws) == found
    few, students = bootstrap_interval(draws[:8]), mean_interval(draws[:8])
    assert 0.6 < (few.high - few.low) / (students.high - students.low) < 0.9
    equal = bootstrap_interval([0.25] * 5)
    assert (equal.low, equal.value, equal.high) == (0.25, 0.25, 0.25)


def test_all_documents_right_does_not_make_a_share_of_one_certain():
    found = share_interval(60, 60, method="exact")
    assert (found.value, found.high, found.n) == (1.0, 1.0, 60)
    assert found.low == pytest.approx(0.025 ** (1 / 60))
    assert share_interval(0, 60, method="exact").high == pytest.approx(1 - found.low)


@pytest.mark.parametrize(("hits", "count"), [(0, 60), (7, 20), (60, 60)])
def test_wilsons_interval_is_where_the_share_is_as_far_off_as_its_own_error(hits, count):
    found = share_interval(hits, count)
    for end in (found.low, found.high):
        if 0 < end < 1:
            error = (end * (1 - end) / count) ** 0.5
            assert abs(hits / count - end) == pytest.approx(1.959964 * error, rel=1e-5)


def test_the_largest_against_the_median_over_resamples():
    noise = np.random.default_rng(1).normal(0, 0.1, (5, 200))
    found = resampled_largest_to_median(np.array([1.0, 1.0, 1.0, 8.0, 0.5])[:, None] + noise)
    assert found.low < found.value < found.high
    assert (found.value, found.n) == (pytest.approx(8, abs=0.3), 200)
    same = resampled_largest_to_median(np.tile([[1.0], [2.0], [6.0]], 4))
    assert (same.low, same.value, same.high) == (3.0, 3.0, 3.0)
    assert resampled_largest_to_median(np.tile([[-1.0], [-1.0], [6.0]], 4)).value == np.inf


@pytest.mark.parametrize(
    "measure",
    [lambda: mean_interval([1.0]), lambda: bootstrap_interval([1.0]), lambda: resampled_largest_to_median(np.ones((3, 1)))],
)
def test_one_value_has_no_interval(measure):
    with pytest.raises(InputError, match="at least 2"):
        measure()


def test_no_document_has_no_share():
    with pytest.raises(InputError, match="at least 1 document"):
        share_interval(0, 0)
