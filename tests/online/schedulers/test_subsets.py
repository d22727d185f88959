"""Dynamic programming over sets of heads finds the optimum."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowattn.online.makespan import makespan
from shadowattn.online.plan import Launch, Work
from shadowattn.online.schedulers.fifo import Fifo
from shadowattn.online.schedulers.local_search import LocalSearch
from shadowattn.online.schedulers.subsets import best_order, plan_of
from tests.online.schedulers.test_schedulers import shortest
from tests.works import plans_of, works


@settings(max_examples=40, deadline=None)
@given(work=works(most_heads=5))
def test_nothing_is_shorter_than_the_optimum(work):
    best = shortest(work)
    assert makespan(work, best_order(work, best * 1.01 + 1)) == pytest.approx(best, rel=1e-12)  # sums of floats, in another order
    assert best_order(work, best * (1 - 1e-9)) is None


@settings(max_examples=60, deadline=None)
@given(data=st.data(), work=works())
def test_launches_by_their_first_head_are_best_for_an_order_of_heads(data, work):
    plan = data.draw(plans_of(work))
    assert makespan(work, plan_of(work, plan.heads)) <= makespan(work, plan) * (1 + 1e-12)


def test_twelve_heads_are_searched_through():
    draw = random.Random(0)
    costs = [[draw.uniform(0, 1e4) for _ in range(12)] for _ in range(3)]
    work = Work(tuple(Launch((head,), us) for head, us in enumerate(costs[0])), tuple(costs[1]), tuple(costs[2]))
    plan = best_order(work, makespan(work, Fifo().plan(work)))
    assert makespan(work, plan) <= makespan(work, LocalSearch(limit_us=50_000).plan(work)) * (1 + 1e-12)
    assert best_order(work, makespan(work, plan) * (1 - 1e-9)) is None
