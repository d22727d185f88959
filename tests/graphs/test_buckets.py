import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape, launches, nearest_pair, plan_shapes


def plan(**changes):
    options = {"heads": 4, "head_dim": 64, "chunk_tokens": 128, "context_tokens": 1000, "launch_heads": (1, 4, 8)}
    return plan_shapes(**options | changes)


def test_capacities_double_up_to_the_context():
    assert plan(launch_heads=(1,)) == tuple(GraphShape(1, 128, 64, keys) for keys in (128, 256, 512, 1000))


def test_no_launch_is_wider_than_the_model():
    assert {shape.heads for shape in plan()} == {1, 4}


def test_a_short_context_needs_no_rows_beyond_it():
    assert plan(context_tokens=100, launch_heads=(1,)) == (GraphShape(1, 100, 64, 100),)


@pytest.mark.parametrize("change", [{"chunk_tokens": 0}, {"context_tokens": 0}, {"launch_heads": ()}, {"launch_heads": (0, 1)}])
def test_refuses_empty_plans(change):
    with pytest.raises(InputError, match="at least"):
        plan(**change)


def test_nearest_is_by_raw_squared_error_and_the_first_on_ties():
    pairs = ((1.0, 1.0), (1.0, 3.0), (4.0, 1.0))
    # In log space 2.2 would be nearer to 4 than to 1 by ratio 1.8 against 2.2; raw, it is nearer to 1.
    assert nearest_pair(pairs, 2.2, 1.0) == 0
    assert nearest_pair(pairs, 1.0, 2.0) == 0
    assert nearest_pair(pairs, 3.0, 1.2) == 2


@given(heads=st.integers(0, 40), sizes=st.lists(st.integers(1, 16), min_size=1, unique=True))
def test_launches_serve_every_head_once_and_waste_only_at_the_end(heads, sizes):
    served = launches(heads, sizes)
    assert sum(taken for taken, _ in served) == heads
    assert all(0 < taken <= size and size in sizes for taken, size in served)
    assert all(taken == size for taken, size in served[:-1])
