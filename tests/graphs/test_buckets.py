import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape, launches, nearest_pair
from shadowattn.types import ScaleGrid


def test_a_group_that_does_not_divide_the_heads_is_refused():
    with pytest.raises(InputError, match="heads a multiple of group"):
        GraphShape(4, 32, 64, 64, group=3)


def test_nearest_is_by_raw_squared_error_and_the_first_on_ties():
    pairs = ((1.0, 1.0), (1.0, 3.0), (4.0, 1.0))
    # In log space 2.2 would be nearer to 4 than to 1 by ratio 1.8 against 2.2; raw, it is nearer to 1.
    assert nearest_pair(pairs, 2.2, 1.0) == 0
    assert nearest_pair(pairs, 1.0, 2.0) == 0
    assert nearest_pair(pairs, 3.0, 1.2) == 2


def test_log_lookup_takes_twice_and_half_for_equally_far():
    pairs = ((1.0, 1.0), (4.0, 1.0))
    assert nearest_pair(pairs, 2.2, 1.0, distance="log") == 1
    assert nearest_pair(pairs, 2.2, 1.0) == 0
    with pytest.raises(InputError, match="expected one of raw, log"):
        nearest_pair(pairs, 1.0, 1.0, distance="cosine")


@given(heads=st.integers(0, 40), sizes=st.lists(st.integers(1, 16), min_size=1, unique=True))
def test_launches_serve_every_head_once_and_waste_only_at_the_end(heads, sizes):
    served = launches(heads, sizes)
    assert sum(taken for taken, _ in served) == heads
    assert all(0 < taken <= size and size in sizes for taken, size in served)
    assert all(taken == size for taken, size in served[:-1])


@pytest.mark.parametrize("distance", ["raw", "log"])
@pytest.mark.parametrize("huge", [1e3, 1e20, 1e100, 1e155, 1e300, sys.float_info.max])
def test_scales_beyond_any_grid_take_the_nearest_pair_all_the_same(huge, distance):
    """Squares of such distances leave the floats, and their differences are rounded away long before."""
    pairs = ScaleGrid((0.01, 0.02, 0.04), (0.01, 0.02, 0.04)).pairs
    assert pairs[nearest_pair(pairs, huge, 0.021, distance=distance)] == (0.04, 0.02)
    assert pairs[nearest_pair(pairs, 0.009, huge, distance=distance)] == (0.01, 0.04)
    assert pairs[nearest_pair(pairs, huge, huge, distance=distance)] == (0.04, 0.04)


@given(st.lists(st.floats(1e-15, 1e15), min_size=1, max_size=4), st.floats(1e-45, 1e308), st.floats(1e-45, 1e308))
def test_the_pair_is_nearest_by_exact_arithmetic(scales, q_scale, k_scale):
    pairs = [(q, k) for q in scales for k in scales]

    def error(pair):
        return sum((Fraction(scale) - Fraction(measured)) ** 2 for scale, measured in zip(pair, (q_scale, k_scale), strict=True))

    found = error(pairs[nearest_pair(pairs, q_scale, k_scale)])
    least = min(map(error, pairs))
    assert found <= least * (1 + Fraction(1, 10**9))  # between the two lie the roundings of floats


@pytest.mark.parametrize("wrong", ["0.02", None, True, torch.tensor(0.02), float("nan"), float("inf"), 0.0, -1.0, 1j])
def test_scales_that_are_no_positive_numbers_are_refused(wrong):
    for pair in ((wrong, 0.02), (0.02, wrong)):
        with pytest.raises(InputError, match=r"lookup: [qk]_scale: expected a"):
            nearest_pair([(0.01, 0.01)], *pair)


@pytest.mark.parametrize("wrong", [2.0, True, "4", None, 0, -1, torch.tensor(4)])
@pytest.mark.parametrize("size", ["heads", "rows", "head_dim", "keys", "group"])
def test_sizes_that_are_no_positive_integers_are_refused(size, wrong):
    with pytest.raises(InputError, match=f"GraphShape.{size}: expected an integer"):
        GraphShape(**{"heads": 1, "rows": 1, "head_dim": 1, "keys": 1} | {size: wrong})
