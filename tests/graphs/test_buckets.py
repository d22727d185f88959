import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape, launches, nearest_pair


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
