"""Dynamic programming over sets of heads finds the optimum, quickly for a dozen heads."""

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from shadowattn.online.makespan import makespan
from shadowattn.online.plan import Launch, Plan, Work
from shadowattn.online.schedulers.fifo import Fifo
from shadowattn.online.schedulers.subsets import best_order, plan_of
from tests.online.schedulers.test_schedulers import shortest
from tests.works import plans_of, works


@settings(max_examples=40, deadline=None)
@given(work=works(most_heads=5))
def test_nothing_is_shorter_than_the_optimum(work):
    best = shortest(work)
    assert makespan(work, best_order(work, best * 1.01 + 1)) == best
    assert best_order(work, best) is None


@settings(max_examples=60, deadline=None)
@given(data=st.data(), work=works())
def test_launches_by_their_first_head_are_best_for_an_order_of_heads(data, work):
    plan = data.draw(plans_of(work))
    assert makespan(work, plan_of(work, plan.heads)) <= makespan(work, plan) * (1 + 1e-12)


def test_twelve_heads_take_less_than_a_second():
    draw = random.Random(0)
    costs = [[draw.uniform(0, 1e4) for _ in range(12)] for _ in range(3)]
    work = Work(tuple(Launch((head,), us) for head, us in enumerate(costs[0])), tuple(costs[1]), tuple(costs[2]))
    start = time.process_time()
    plan = best_order(work, makespan(work, Fifo().plan(work)))
    assert time.process_time() - start < 1
    assert isinstance(plan, Plan)
