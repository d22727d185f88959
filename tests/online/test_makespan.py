"""The model of an order's length, against a simulation event by event, and its bounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.online.makespan import makespan
from shadowattn.online.plan import Launch, Plan, Work
from shadowattn.online.schedulers.bounds import lower_bound
from tests.works import plans_of, works

# One launch of two heads: the authors' own example.
EXAMPLE = Work((Launch((0, 1), 10.0),), (1.0, 8.0), (10.0, 1.0))


def test_by_hand():
    assert makespan(EXAMPLE, Plan((0,), (0, 1))) == 22  # selected at 11 and 19; attended to at 21 and 22
    assert makespan(EXAMPLE, Plan((0,), (1, 0))) == 29
    assert makespan(EXAMPLE, Plan((0,), (1, 0)), machines=2) == 30


def test_a_head_whose_launch_is_late_holds_up_the_rest():
    work = Work((Launch((0,), 1.0), Launch((1,), 1.0)), (1.0, 1.0), (1.0, 1.0))
    assert makespan(work, Plan((0, 1), (0, 1))) == 4
    assert makespan(work, Plan((0, 1), (1, 0))) == 5


@given(st.data())
def test_no_plan_beats_the_bounds_nor_takes_longer_than_no_overlap(data):
    work = data.draw(works())
    plan = data.draw(plans_of(work))
    everything = sum(launch.estimate_us for launch in work.launches) + sum(work.select_us) + sum(work.attend_us)
    for machines in (2, 3):
        length = makespan(work, plan, machines=machines)
        assert lower_bound(work, machines=machines) <= length * (1 + 1e-9) <= everything * (1 + 2e-9)
    assert makespan(work, plan) <= makespan(work, plan, machines=2) * (1 + 1e-9)


def kept(work: Work, plan: Plan) -> int:
    """Most heads that are launched and not yet taken, when the launches of the next head are over."""
    launched, most, launches = set(), 0, list(plan.launches)
    for taken, head in enumerate(plan.heads):
        while head not in launched:
            launched |= set(work.launches[launches.pop(0)].heads)
        most = max(most, len(launched) - taken)
    return most


@given(st.data())
def test_launches_as_they_are_wanted_end_no_later_and_keep_no_more(data):
    work = data.draw(works())
    plan = data.draw(plans_of(work))
    tidy = plan.launched_as_wanted(work)
    assert tidy.heads == plan.heads
    for machines in (2, 3):
        assert makespan(work, tidy, machines=machines) <= makespan(work, plan, machines=machines) * (1 + 1e-12)
    assert kept(work, tidy) <= kept(work, plan)
    assert tidy.launched_as_wanted(work) == tidy


@given(st.data())
def test_launch_by_launch_keeps_the_heads_of_one(data):
    work = data.draw(works())
    plan = data.draw(plans_of(work)).launch_by_launch(work)
    assert kept(work, plan) == max(len(launch.heads) for launch in work.launches)
    assert plan.launched_as_wanted(work) == plan == plan.launch_by_launch(work)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Work((Launch((0,), 1.0),), (1.0, 1.0), (1.0, 1.0)), "each of 2 heads in exactly one launch"),
        (Work((Launch((0, 0), 1.0),), (1.0,), (1.0,)), "exactly one launch"),
        (Work((Launch((0,), 1.0),), (1.0,), ()), "as many attention costs"),
        (Work((Launch((0,), 1.0), Launch((), 1.0)), (1.0,), (1.0,)), "at least one head in every launch"),
        (Work((Launch((0,), -1.0),), (1.0,), (1.0,)), "finite costs"),
        (Work((Launch((0,), 1.0),), (math.nan,), (1.0,)), "finite costs"),
        (Work((Launch((0,), 1.0),), (1.0,), (math.inf,)), "finite costs"),
    ],
)
def test_works_that_are_none_are_refused(work, message):
    with pytest.raises(InputError, match=message):
        lower_bound(work)


@pytest.mark.parametrize("plan", [Plan((0,), (0,)), Plan((), (0, 1)), Plan((0,), (0, 0)), Plan((1,), (0, 1))])
def test_plans_of_another_work_are_refused(plan):
    with pytest.raises(InputError, match="plan: expected an order of"):
        makespan(EXAMPLE, plan)


def test_there_are_two_or_three_machines():
    with pytest.raises(InputError, match="machines: expected 2"):
        makespan(EXAMPLE, Plan((0,), (0, 1)), machines=4)
