"""Two pieces of work on what calls share: a bank's memory, packed keys, counters."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch

import shadowattn
from shadowattn.exclusive import Exclusive, current_work, working_for
from shadowattn.graphs import GraphForm
from shadowattn.graphs.graph import Graph
from shadowattn.online.attention import Counters, SparseAttention
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.pipeline import Pipeline
from tests.profiles import bank_for
from tests.tensors import qkv
from tests.tiny import tiny_model

LONG = 20.0  # seconds that a test waits for what must happen


def in_threads(*works: Callable[[], object]) -> list:
    """What each returns, begun together. An error of one is raised here."""
    barrier, results, errors = threading.Barrier(len(works)), [None] * len(works), []

    def run(place: int) -> None:
        try:
            barrier.wait(LONG)
            results[place] = works[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def meeting(call: Callable) -> Callable:
    """`call`, after which two threads wait for one another, for as long as one that nobody keeps out would need."""
    barrier = threading.Barrier(2)

    def met(*arguments, **options):
        result = call(*arguments, **options)
        try:
            barrier.wait(0.05)
        except threading.BrokenBarrierError:  # the other is kept out, as it should
            barrier.reset()
        return result

    return met


def test_other_work_waits_and_the_same_enters_again():
    exclusive, inside, order = Exclusive(), threading.Event(), []

    def first():
        with exclusive.use() as outermost:
            inside.set()
            with exclusive.use() as again:
                order.append((outermost, again))
            waiting.wait(0.2)
            order.append("first is over")

    def second():
        assert inside.wait(LONG)
        waiting.set()
        with exclusive.use():
            order.append("second")

    waiting = threading.Event()
    in_threads(first, second)
    assert order == [(True, False), "first is over", "second"]


def test_threads_that_work_for_another_enter_what_it_holds():
    exclusive, work = Exclusive(), current_work()

    def helper():
        with working_for(work), exclusive.use() as outermost:
            return outermost, current_work() is work

    with exclusive.use():
        assert in_threads(helper) == [(False, True)]
        assert copy.deepcopy(exclusive)._holder is None


@pytest.fixture(scope="module", params=["static", "unit"])
def bank(request):
    made = bank_for(tiny_model(), form=GraphForm(request.param))
    made.compile()
    return made


def inputs(seed: int, rows: int = 64):
    """Heads of one scale bucket, so that scores are the bank's own memory, not copied together from several launches."""
    q, k, v = qkv(2, 1, rows, rows, 64, seed=seed)
    q[1] = q[0].flip(0)
    return q, k, v


@pytest.mark.parametrize("mode", ["batched", "serial", "overlap", "grouped"])
def test_two_threads_on_one_bank_get_what_one_thread_gets(bank, mode, monkeypatch):
    """Each thread with its own prompt; every inference waits for the other's, if that can come."""
    prompts = [inputs(seed) for seed in range(2)]

    def layer(prompt):
        sparse = SparseAttention([[0.2] * 2], Int8Graph(bank), chunk_tokens=32, pipeline=Pipeline(mode))
        return sparse(0, *(x[None] for x in prompt), 0.125)

    expected = [layer(prompt) for prompt in prompts]
    monkeypatch.setattr(Graph, "_run", meeting(Graph._run))
    for _ in range(3):
        outs = in_threads(*(lambda prompt=prompt: layer(prompt) for prompt in prompts))
        assert all(out.equal(right) for out, right in zip(outs, expected, strict=True))


def test_scores_asked_for_in_two_threads_stay_what_they_are(bank, monkeypatch):
    prompts = [inputs(seed, rows=32) for seed in range(2)]
    estimator = Int8Graph(bank)

    def estimate(prompt):
        return estimator.scores(Chunk.of(prompt[0], prompt[1]))

    def run(prompt):
        return bank.lookup(0.02, 0.02, heads=2, rows=32, keys=32, head_dim=64).run(
            prompt[0], prompt[1], q_scales=torch.full((2,), 0.02), k_scales=torch.full((1,), 0.02)
        )

    for call in (estimate, run):
        expected = [call(prompt).clone() for prompt in prompts]
        with monkeypatch.context() as patch:
            patch.setattr(Graph, "_run", meeting(Graph._run))
            for _ in range(3):
                scores = in_threads(*(lambda prompt=prompt, call=call: call(prompt) for prompt in prompts))
                assert all(one.equal(right) for one, right in zip(scores, expected, strict=True))


def test_somebodys_estimator_made_of_ours_serves_two_threads(bank):
    estimator, prompts = Int8Graph(bank), [inputs(seed) for seed in range(2)]

    def call(prompt):
        return shadowattn.sparse_attention(*prompt, 0.2, causal_offset=0, estimator=Int8Each(estimator))

    expected = [call(prompt) for prompt in prompts]
    launched = estimator.launched
    for repeat in range(2, 12):
        outs = in_threads(*(lambda prompt=prompt: call(prompt) for prompt in prompts))
        assert all(out.equal(right) for out, right in zip(outs, expected, strict=True))
        assert estimator.launched == repeat * launched


class Int8Each(Estimator):
    """An estimator of somebody's that asks one of ours for 32 rows at a time."""

    def __init__(self, estimator):
        self.estimator = estimator

    def scores(self, chunk):
        parts = [
            self.estimator.scores(chunk.asking(lambda q, at=at: q[:, at : at + 32], chunk.positions[at : at + 32]))
            for at in range(0, len(chunk.positions), 32)
        ]
        return torch.cat(parts, 1)


def test_counters_of_two_threads_add_up():
    class Slow(Counters):
        """Other threads may come in between reading and writing."""

        @property
        def sparse_rows(self):
            return read(self)

        @sparse_rows.setter
        def sparse_rows(self, value):
            self.rows = value

    read = meeting(lambda counters: vars(counters).get("rows", 0))
    prefill, prompt = SparseAttention([[0.2] * 4], Oracle(), chunk_tokens=32), qkv(4, 2, 32, 32, 64)
    prefill.counters = Slow()
    in_threads(*2 * [lambda: prefill(0, *(x[None] for x in prompt), 0.125)])
    assert prefill.counters.sparse_rows == 2 * 4 * 32
