"""The record of what ran when."""

import json

import pytest

from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.timeline import STAGES, Span, Timeline, chrome_trace
from tests.online.test_executor import DIM, HEADS, KEYS, ROWS, make_stages


@pytest.mark.parametrize("mode", ["serial", "overlap", "grouped"])
def test_every_stage_of_every_head_is_recorded(mode):
    stages = make_stages(Oracle())
    ran = Pipeline(mode).run(stages, keep_lists=True)
    for stage in STAGES:
        spans = [span for span in ran.timeline.spans if span.stage == stage]
        assert sorted(head for span in spans for head in span.heads) == list(range(HEADS))
        for one, following in zip(spans, spans[1:], strict=False):  # a worker does one thing at a time
            assert 0 <= one.start_us < one.end_us <= following.start_us
    end = {(span.stage, head): span.end_us for span in ran.timeline.spans for head in span.heads}
    start = {(span.stage, head): span.start_us for span in ran.timeline.spans for head in span.heads}
    for head in range(HEADS):
        assert end["estimate", head] <= start["select", head]
        assert end["select", head] <= start["attend", head]
    assert ran.timeline.measured == "measured"
    assert ran.timeline.makespan_us == max(end.values()) - min(start.values())


def test_bytes_count_every_operand():
    spans = Pipeline("serial").run(stages := make_stages(Oracle()), keep_lists=True).timeline.spans
    estimate, select, attend = spans[:3]
    chunk = stages.chunk
    listed = int(stages.rule.lists(chunk.retention, chunk.positions).indptr[ROWS])
    assert estimate.bytes == 4 * (ROWS * DIM + KEYS * DIM + ROWS * KEYS)
    assert select.bytes == 4 * (ROWS * KEYS + listed)
    assert attend.bytes == 4 * (2 * ROWS * DIM + listed + 2 * listed * DIM)


def test_an_estimator_that_selects_has_two_stages():
    spans = Pipeline("overlap").run(make_stages(Int8Fused), keep_lists=True).timeline.spans
    assert {span.stage for span in spans} == {"estimate", "attend"}


def test_busy_time_and_makespan():
    spans = (Span("estimate", (0, 1), 1.0, 4.0, "NPU", 8), Span("select", (0,), 4.0, 5.0, "CPU", 8))
    timeline = Timeline(spans, "simulated")
    assert timeline.makespan_us == 4.0
    assert [timeline.busy_us(stage) for stage in STAGES] == [3.0, 1.0, 0]


def test_a_chrome_trace_is_json_with_the_fields_that_viewers_read():
    timelines = {mode: Pipeline(mode).run(make_stages(Oracle()), keep_lists=False).timeline for mode in ("serial", "overlap")}
    trace = json.loads(json.dumps(chrome_trace(timelines), allow_nan=False))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == sum(len(timeline.spans) for timeline in timelines.values())
    for event in events:
        assert event["dur"] > 0
        assert event["ts"] >= 0
        assert {"name", "cat", "pid", "tid", "args"} <= set(event)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert all(names[event["pid"], event["tid"]] == event["cat"] for event in events)
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["serial (measured)", "overlap (measured)"]
