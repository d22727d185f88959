"""Every scheduler gives a valid plan; the guarded are what they promise; the optimum is one."""

import subprocess
import sys
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.online.makespan import check_plan, finish, makespan, released
from shadowattn.online.plan import Launch, Plan, Work
from shadowattn.online.schedulers.bounds import lower_bound
from shadowattn.online.schedulers.fifo import Fifo
from shadowattn.online.schedulers.greedy import Greedy, greedy_plan
from shadowattn.online.schedulers.greedy_guarded import GreedyGuarded
from shadowattn.online.schedulers.johnson import Johnson
from shadowattn.online.schedulers.local_search import LocalSearch
from shadowattn.online.schedulers.optimal import Optimal
from shadowattn.online.schedulers.sequential import Sequential
from tests.online.test_makespan import EXAMPLE
from tests.works import works

BY_MACHINES = (GreedyGuarded, LocalSearch, Optimal)
ALL = [Sequential(), Fifo(), Greedy(), Johnson(), *(part(machines) for part in BY_MACHINES for machines in (2, 3))]


@pytest.mark.parametrize("scheduler", ALL, ids=str)
@settings(max_examples=20, deadline=None)
@given(work=works())
def test_every_plan_orders_every_launch_and_head_once(scheduler, work):
    check_plan(work, scheduler.plan(work))


def test_the_authors_counter_example():
    assert makespan(EXAMPLE, Fifo().plan(EXAMPLE)) == 22
    assert makespan(EXAMPLE, Greedy().plan(EXAMPLE)) == 29
    assert makespan(EXAMPLE, GreedyGuarded().plan(EXAMPLE)) == 22
    assert makespan(EXAMPLE, LocalSearch(limit_us=1e9).plan(EXAMPLE)) == 22
    assert Optimal().solve(EXAMPLE).makespan_us == 22


def test_greedy_takes_the_launch_that_ends_first_and_the_first_on_ties():
    alike = Work((Launch((2,), 3.0), Launch((1,), 3.0), Launch((0,), 2.0)), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    assert Greedy().plan(alike) == Plan((2, 0, 1), (0, 2, 1))
    together = Work((Launch((2, 0, 1), 3.0),), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    assert Greedy().plan(together).heads == (0, 1, 2)


@settings(max_examples=60, deadline=None)
@given(work=works(), machines=st.sampled_from([2, 3]))
def test_guarded_greedy_is_never_worse_than_fifo(work, machines):
    guarded, fifo = (makespan(work, s.plan(work), machines=machines) for s in (GreedyGuarded(machines), Fifo()))
    assert guarded <= fifo + 1e-9


def test_a_guard_on_three_machines_is_none_on_two():
    work = Work((Launch((0,), 1.0), Launch((1,), 9.0), Launch((2,), 9.0)), (6.0, 3.0, 7.0), (8.0, 2.0, 1.0))
    plans = [scheduler.plan(work) for scheduler in (GreedyGuarded(3), GreedyGuarded(2), Fifo())]
    three, two, fifo = (makespan(work, plan, machines=2) for plan in plans)
    assert (three, two) == (pytest.approx(9 / 7 * fifo), fifo)


def test_out_of_time_local_search_does_without_the_greedy():
    heads = range(64)
    work = Work(tuple(Launch((h,), 1.0 + 7 * h % 11) for h in heads), *(tuple(1.0 + s * h % 13 for h in heads) for s in (5, 3)))
    assert greedy_plan(work, end=0.0) is None
    hasty = LocalSearch(limit_us=1e-3).plan(work)
    check_plan(work, hasty)
    assert makespan(work, hasty) <= makespan(work, Fifo().plan(work))


@settings(max_examples=60, deadline=None)
@given(work=works(), machines=st.sampled_from([2, 3]))
def test_local_search_is_never_worse_than_what_it_begins_with(work, machines):
    searched = makespan(work, LocalSearch(machines, limit_us=1e9).plan(work), machines=machines)  # no clock on a busy machine
    for other in (Fifo(), Greedy(), Johnson()):
        assert searched <= makespan(work, other.plan(work), machines=machines) * (1 + 1e-9) + 1e-9


def shortest(work: Work, machines: int = 3) -> float:
    """Of every order of launches with every order of heads."""
    releases = [released(work, launches) for launches in permutations(range(len(work.launches)))]
    orders = list(permutations(range(len(work.select_us))))
    return min(finish(release, work.select_us, work.attend_us, heads, machines) for release in releases for heads in orders)


def scaled(work: Work, scale: float) -> Work:
    launches = tuple(replace(launch, estimate_us=scale * launch.estimate_us) for launch in work.launches)
    return Work(launches, *(tuple(scale * cost for cost in costs) for costs in (work.select_us, work.attend_us)))


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e3])
@settings(max_examples=25, deadline=None)
@given(work=works(most_heads=5), machines=st.sampled_from([2, 3]))
def test_the_optimum_is_that_of_all_plans(scale, work, machines):
    work = scaled(work, scale)
    solution = Optimal(machines).solve(work)
    assert solution.proven
    assert solution.makespan_us == pytest.approx(shortest(work, machines), rel=1e-9)
    assert solution.makespan_us == makespan(work, solution.plan, machines=machines)
    assert solution.bound_us == solution.makespan_us


def test_the_optimum_of_costs_of_ten_milliseconds():
    """Four heads that a search in thousandths of microseconds does not finish in ten seconds, and gets wrong."""
    work = Work(
        (Launch((3, 2, 1), 2304.5307354286647), Launch((0,), 1172.0293918064606)),
        (9479.683496808717, 4767.3246541203725, 4340.464334746424, 2622.705874541672),
        (9625.423303368432, 1860.8324426928457, 5713.434799032861, 5107.558663733131),
    )
    solution = Optimal().solve(work)
    assert solution.proven
    assert solution.makespan_us == pytest.approx(30233.64, abs=0.01)


@pytest.mark.parametrize("scale", [1e-5, 1e3])
@settings(max_examples=12, deadline=None)
@given(work=works(most_heads=5))
def test_constraint_programming_says_how_far_its_plan_may_be_from_the_optimum(scale, work):
    """On works that it is not needed for: its bound is one, and where it is done the plan is the optimum but for the steps."""
    work = scaled(work, scale)
    best, start = shortest(work), Fifo().plan(work)
    if best == 0:
        return
    solution = Optimal()._search(work, start, makespan(work, start), lower_bound(work))
    assert solution.proven
    assert solution.makespan_us == makespan(work, solution.plan)
    assert solution.bound_us <= best * (1 + 1e-9) <= solution.makespan_us * (1 + 2e-9)
    assert solution.makespan_us <= solution.bound_us + 11e-7 * makespan(work, start)


@settings(max_examples=25, deadline=None)
@given(work=works(most_heads=5))
def test_johnson_is_the_optimum_of_two_machines(work):
    best = shortest(work, machines=2)
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
    with pytest.raises(InputError, match="workers: expected at least 1"):
        Optimal(workers=0)
    for scheduler in BY_MACHINES:
        with pytest.raises(InputError, match="machines: expected 2"):
            scheduler(machines=1)


def test_an_interruption_after_a_search_still_reaches_python():
    """OR-tools would take SIGINT for itself, and leave it to end the process."""
    script = """
import signal
from shadowattn.online.plan import Launch, Work
from shadowattn.online.schedulers.optimal import Optimal

costs = tuple(float(7 * head % 13 + 1) for head in range(13))
launches = tuple(Launch((head,), us) for head, us in enumerate(costs[::-1]))
Optimal(limit_s=0.2).solve(Work(launches, costs, costs[3:] + costs[:3]))
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0)
