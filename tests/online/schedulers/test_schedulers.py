"""Every scheduler gives a valid plan; the guarded are what they promise; the optimum is one."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.online.makespan import check_plan, makespan
from shadowattn.online.plan import Launch, Plan, Work
from shadowattn.online.schedulers.bounds import lower_bound
from shadowattn.online.schedulers.fifo import Fifo
from shadowattn.online.schedulers.greedy import Greedy
from shadowattn.online.schedulers.greedy_guarded import GreedyGuarded
from shadowattn.online.schedulers.johnson import Johnson
from shadowattn.online.schedulers.local_search import LocalSearch
from shadowattn.online.schedulers.optimal import Optimal
from shadowattn.online.schedulers.sequential import Sequential
from tests.online.test_makespan import EXAMPLE
from tests.works import works

ALL = [Sequential(), Fifo(), Greedy(), GreedyGuarded(), Johnson(), LocalSearch(3), LocalSearch(2), Optimal(3), Optimal(2)]


@pytest.mark.parametrize("scheduler", ALL, ids=str)
@settings(max_examples=20, deadline=None)
@given(work=works())
def test_every_plan_orders_every_launch_and_head_once(scheduler, work):
    check_plan(work, scheduler.plan(work))


def test_the_authors_counter_example():
    assert makespan(EXAMPLE, Fifo().plan(EXAMPLE)) == 22
    assert makespan(EXAMPLE, Greedy().plan(EXAMPLE)) == 29
    assert makespan(EXAMPLE, GreedyGuarded().plan(EXAMPLE)) == 22
    assert makespan(EXAMPLE, LocalSearch().plan(EXAMPLE)) == 22
    assert Optimal().solve(EXAMPLE).makespan_us == 22


def test_greedy_takes_the_launch_that_ends_first_and_the_first_on_ties():
    alike = Work((Launch((2,), 3.0), Launch((1,), 3.0), Launch((0,), 2.0)), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    assert Greedy().plan(alike) == Plan((2, 0, 1), (0, 2, 1))
    together = Work((Launch((2, 0, 1), 3.0),), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    assert Greedy().plan(together).heads == (0, 1, 2)


@settings(max_examples=60, deadline=None)
@given(work=works())
def test_guarded_greedy_is_never_worse_than_fifo(work):
    assert makespan(work, GreedyGuarded().plan(work)) <= makespan(work, Fifo().plan(work)) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(work=works(), machines=st.sampled_from([2, 3]))
def test_local_search_is_never_worse_than_what_it_begins_with(work, machines):
    searched = makespan(work, LocalSearch(machines).plan(work), machines=machines)
    for other in (Fifo(), Greedy(), Johnson()):
        assert searched <= makespan(work, other.plan(work), machines=machines) * (1 + 1e-9) + 1e-9


@settings(max_examples=25, deadline=None)
@given(work=works(most_heads=5), machines=st.sampled_from([2, 3]))
def test_the_optimum_is_that_of_all_plans(work, machines):
    """Every order of launches with every order of heads."""
    best = min(
        makespan(work, Plan(launches, heads), machines=machines)
        for launches in permutations(range(len(work.launches)))
        for heads in permutations(range(len(work.select_us)))
    )
    solution = Optimal(machines).solve(work)
    assert solution.proven
    assert solution.makespan_us == pytest.approx(best, abs=0.02)  # costs are rounded to thousandths
    assert solution.makespan_us == makespan(work, solution.plan, machines=machines)
    assert solution.bound_us == solution.makespan_us


@settings(max_examples=25, deadline=None)
@given(work=works(most_heads=5))
def test_johnson_is_the_optimum_of_two_machines(work):
    best = min(
        makespan(work, Plan(launches, heads), machines=2)
        for launches in permutations(range(len(work.launches)))
        for heads in permutations(range(len(work.select_us)))
    )
    assert makespan(work, Johnson().plan(work), machines=2) == pytest.approx(best, abs=1e-6)
    assert lower_bound(work, machines=2) == pytest.approx(best, abs=1e-6)


def test_the_optimum_where_things_take_no_time():
    """Ties in time are broken so that what takes none does not wait."""
    launches = (Launch((0,), 0.0), Launch((3,), 0.0), Launch((2, 1), 0.0), Launch((4,), 1.0))
    work = Work(launches, (0.0, 1.0, 2.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0, 2.0))
    assert Optimal(3).solve(work).makespan_us == 3.0


def test_a_search_out_of_time_still_has_a_plan_and_a_bound():
    heads = range(24)
    work = Work(
        tuple(Launch((h,), 1.0 + (7 * h) % 11) for h in heads), tuple(1.0 + (5 * h) % 13 for h in heads),
        tuple(1.0 + (3 * h) % 17 for h in heads),
    )  # fmt: skip
    solution = Optimal(limit_s=0.05).solve(work)
    assert lower_bound(work) <= solution.bound_us <= solution.makespan_us
    check_plan(work, solution.plan)


@pytest.mark.parametrize("scheduler", ALL, ids=str)
def test_bad_works_are_refused(scheduler):
    with pytest.raises(InputError, match="exactly one launch"):
        scheduler.plan(Work((Launch((0,), 1.0),), (1.0, 1.0), (1.0, 1.0)))


def test_bad_limits_are_refused():
    with pytest.raises(InputError, match="limit_us: expected a time above 0"):
        LocalSearch(limit_us=0)
    with pytest.raises(InputError, match="limit_s: expected a time above 0"):
        Optimal(limit_s=-1)
    with pytest.raises(InputError, match="machines: expected 2"):
        LocalSearch(machines=1)
