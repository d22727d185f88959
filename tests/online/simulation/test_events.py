"""The event simulation: the model of an order where nothing is in short supply, and the executor's rules where something is."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.online.makespan import makespan
from shadowattn.online.plan import Launch, Plan, Work
from shadowattn.online.simulation import simulate
from tests.works import plans_of, works

CHAIN = Work(tuple(Launch((head,), 1.0) for head in range(4)), (2.0,) * 4, (3.0,) * 4)
IN_ORDER = Plan((0, 1, 2, 3), (0, 1, 2, 3))


@settings(max_examples=150)
@given(st.data())
def test_with_room_and_cores_it_is_the_makespan(data):
    work = data.draw(works())
    plan = data.draw(plans_of(work))
    timeline = simulate(work, plan, queue_heads=math.inf)
    assert max(span.end_us for span in timeline.spans) == pytest.approx(makespan(work, plan), rel=1e-9, abs=1e-6)
    assert timeline.measured == "simulated"


@settings(max_examples=100)
@given(st.data(), st.sampled_from([1, 2, math.inf]), st.sampled_from([1, 2, 3]), st.sampled_from(["CPU", "NPU"]))
def test_every_course_keeps_the_rules(data, queue_heads, cores, device):
    """Each stage does one thing at a time, in order, after the stage before; short supply never helps."""
    work = data.draw(works())
    plan = data.draw(plans_of(work))
    timeline = simulate(work, plan, queue_heads=queue_heads, cores=cores, device=device)
    ends = {}
    for stage in ("estimate", "select", "attend"):
        spans = [span for span in timeline.spans if span.stage == stage]
        for before, after in zip(spans, spans[1:], strict=False):
            assert before.end_us <= after.start_us + 1e-6
        ends[stage] = {head: span for span in spans for head in span.heads}
        assert sorted(ends[stage]) == list(range(len(work.select_us)))
    for head in range(len(work.select_us)):
        assert ends["estimate"][head].end_us <= ends["select"][head].start_us + 1e-6
        assert ends["select"][head].end_us <= ends["attend"][head].start_us + 1e-6
    last = max(span.end_us for span in timeline.spans)
    assert last >= makespan(work, plan) * (1 - 1e-9) - 1e-6
    total = sum(work.select_us) + sum(work.attend_us) + (sum(w.estimate_us for w in work.launches) if device == "CPU" else 0)
    assert last >= total / cores * (1 - 1e-9) - 1e-6  # a task is over with 10⁻⁹ µs left of it


@given(st.data())
def test_one_stage_at_a_time_takes_the_sum(data):
    work = data.draw(works())
    plan = data.draw(plans_of(work))
    total = sum(launch.estimate_us for launch in work.launches) + sum(work.select_us) + sum(work.attend_us)
    timeline = simulate(work, plan, mode="serial")
    assert max(span.end_us for span in timeline.spans) == pytest.approx(total, rel=1e-9, abs=1e-6)


def test_a_full_queue_holds_up_the_device():
    starts = {q: _starts(simulate(CHAIN, IN_ORDER, queue_heads=q), "estimate") for q in (1, math.inf)}
    assert starts[math.inf] == [0, 1, 2, 3]
    # Head 1 waits in the queue from 2 on; head 2, done at 3, finds it full until head 1 is taken at 3; head 3 until 6,
    # for the selection of head 1 ends at 5 and finds attention busy, its own queue empty.
    assert starts[1] == [0, 1, 2, 3]
    longer = Work(CHAIN.launches * 1, (2.0,) * 4, (9.0,) * 4)
    assert _starts(simulate(longer, IN_ORDER, queue_heads=1), "select") == [1, 3, 5, 12]


def test_three_stages_on_two_cores_slow_each_other_down():
    work = Work(tuple(Launch((head,), 3.0) for head in range(3)), (3.0,) * 3, (3.0,) * 3)
    plan = Plan((0, 1, 2), (0, 1, 2))
    assert simulate(work, plan, cores=3, device="CPU").makespan_us == 15
    # 27 µs of work; one stage works in the first and last 3, two in the next, and in between three share two cores.
    assert simulate(work, plan, cores=2, device="CPU").makespan_us == pytest.approx(16.5)
    assert simulate(work, plan, cores=1, device="CPU").makespan_us == pytest.approx(27)
    assert simulate(work, plan, cores=1, device="NPU").makespan_us == pytest.approx(21)


def test_a_stage_that_waited_takes_time_to_wake():
    work = Work((Launch((0,), 5.0), Launch((1,), 5.0)), (1.0, 1.0), (9.0, 1.0))
    plan = Plan((0, 1), (0, 1))
    assert simulate(work, plan).makespan_us == 16  # selected at 6 and 11, attended to at 15 and 16
    # Selection waits twice; attention waits once, and finds its second head there.
    assert simulate(work, plan, wakeup_latency_us=2.0).makespan_us == 20
    assert simulate(work, plan, wakeup_latency_us=2.0, mode="serial").makespan_us == 22


def test_refusals():
    with pytest.raises(InputError, match="plan: expected an order"):
        simulate(CHAIN, Plan((0,), (0,)))
    with pytest.raises(InputError, match="mode: expected one of serial, overlap"):
        simulate(CHAIN, IN_ORDER, mode="grouped")
    with pytest.raises(InputError, match="wakeup_latency_us: expected a time"):
        simulate(CHAIN, IN_ORDER, wakeup_latency_us=-1)
    with pytest.raises(InputError, match="queue_heads of at least 1"):
        simulate(CHAIN, IN_ORDER, queue_heads=0)


def _starts(timeline, stage):
    return [span.start_us for span in timeline.spans if span.stage == stage]
