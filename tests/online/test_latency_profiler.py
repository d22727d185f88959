"""The latency profile against a machine whose every cost is known: a clock that estimator and kernels set forward."""

import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from shadowattn.graphs.bank import GraphBank
from shadowattn.kernels import choose
from shadowattn.online import executor, latency_profiler
from shadowattn.online.estimators.int8_graph import Buckets, Int8Graph
from shadowattn.online.executor import Threads
from shadowattn.online.latency import LatencyProfile, without_slowest
from shadowattn.online.latency_profiler import LatencyProfiler
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Stages
from shadowattn.types import RetentionProfile
from tests.online.test_executor import DIM, GRID, HEADS, KEYS, KV_HEADS, ROWS, bank, make_stages
from tests.profiles import key_offset

__all__ = ["bank"]  # the fixture

RETENTIONS = (0.1, 0.3, 0.6)
LAUNCH_US, SWITCH_US = 100.0, 15.0


@dataclass
class Clock:
    us: float = 0.0
    started: int = 0
    bucket: int = -1
    hold_up: dict[int, float] = field(default_factory=dict)  # what something else takes of a launch, by its number

    def perf_counter(self) -> float:
        return self.us * 1e-6


@dataclass
class Clocked:
    """Kernels that take a microsecond a kept key for selection and two for attention."""

    clock: Clock
    name: str = "torch"

    def select(self, scores, lists):
        selection = choose("torch", head_dim=DIM, dtype=scores.dtype).select(scores, lists)
        self.clock.us += selection.kept() / 100
        return selection

    def attend(self, q, k, v, selection, heads, *, scale):
        self.clock.us += 2 * selection.kept() / 100
        return choose("torch", head_dim=DIM, dtype=q.dtype).attend(q, k, v, selection, heads, scale=scale)


class ClockedInt8(Int8Graph):
    """A launch takes longer where the one before it ran another bucket's graph."""

    clock: Clock

    def prepare(self, chunk):
        self.clock.us += 7.0
        super().prepare(chunk)

    def launch(self, chunk, group):
        clock = self.clock
        clock.started += 1
        clock.us += LAUNCH_US * len(group.heads) + SWITCH_US * (group.bucket != clock.bucket)
        clock.us += clock.hold_up.get(clock.started, 0.0)
        clock.bucket = group.bucket
        return super().launch(chunk, group)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (executor, latency_profiler):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def probe_on(clock, bank) -> LatencyProfiler:
    estimator = ClockedInt8(bank)
    estimator.clock = clock
    dtype = make_stages(Int8Graph(bank)).chunk.q.dtype
    return LatencyProfiler(HEADS, KV_HEADS, DIM, ROWS, dtype, estimator, Rule(), Clocked(clock), Threads(), pool=None)


def test_a_launch_costs_what_it_costs_after_another_bucket(clock, bank):
    """Running one bucket's graph twice would say 100; in a layer nearly every launch follows one of another bucket."""
    points = probe_on(clock, bank).measure(KEYS, RETENTIONS, repeats=3)
    for size in (1, 2):
        launches = [point.mean_us - size * LAUNCH_US for point in points if (point.stage, point.heads) == ("estimate", size)]
        assert len(launches) == 9
        assert sum(launches) / 9 > 0.7 * SWITCH_US
        assert max(launches) == pytest.approx(SWITCH_US)
    call = {point.stage: point.mean_us for point in points if point.stage in ("prepare", "task_overhead")}
    assert call == {"prepare": pytest.approx(7.0), "task_overhead": pytest.approx(0.0, abs=1e-6)}


def test_the_profile_predicts_a_call_of_off_it_has_not_seen(clock, bank):
    measured = probe_on(clock, bank)
    profile = LatencyProfile(measured.binding(), tuple(measured.measure(KEYS, RETENTIONS, repeats=3)))
    draw, off = random.Random(5), Pipeline("serial")
    for seed in range(100, 104):
        chunk = measured.chunk(measured.mixed(draw), [draw.uniform(0.1, 0.6) for _ in range(HEADS)], KEYS, seed=seed)
        start = clock.us
        stages = Stages(chunk, measured.parts)
        ran = off.run(stages, keep_lists=False)
        took = clock.us - start
        singles = [replace(group, heads=(head,)) for group in stages.launches() for head in group.heads]
        work = profile.work(singles, chunk.retention.tolist(), keys=KEYS)
        predicted = sum(launch.estimate_us for launch in work.launches) + sum(work.select_us) + sum(work.attend_us)
        predicted += profile.call_us("prepare", KEYS) + profile.call_us("task_overhead", KEYS) * len(ran.timeline.spans)
        assert predicted == pytest.approx(took, rel=0.05)


def test_layouts_mix_buckets_and_hold_every_launch_and_retention(bank):
    measured = probe_on(Clock(), bank)
    for size in measured.sizes(KEYS):
        layouts = measured.layouts(RETENTIONS, [size])
        assert {g.bucket for one in layouts for g in one.launches if len(g.heads) == size} == set(range(9))
        assert {kept for one in layouts for kept in one.retention} == set(RETENTIONS)
        for one in layouts:
            assert [head for group in one.launches for head in group.heads] == list(range(HEADS))
            chunk = measured.chunk(one.pairs, one.retention, KEYS, seed=0)
            served = {head: group.bucket for group in Stages(chunk, measured.parts).launches() for head in group.heads}
            assert served == {head: group.bucket for group in one.launches for head in group.heads}
        pairs = [pair for one in layouts for pair in zip(one.launches, one.launches[1:], strict=False)]
        assert sum(a.bucket != b.bucket for a, b in pairs) > 0.6 * len(pairs)


def test_a_bank_with_a_key_offset_is_measured_in_the_buckets_asked_for(bank):
    """Keys are made around the offset, and a launch that subtracts one is another launch."""
    offset = key_offset(1, KV_HEADS, DIM, size=5.0)
    profile = RetentionProfile(((0.2,) * HEADS,), replace(GRID, key_offset=offset), DIM, "", "", "")
    shifted = GraphBank.build(profile, bank.shapes)
    measured, plain = (probe_on(Clock(), one) for one in (shifted, bank))
    for layout in measured.layouts(RETENTIONS, [1]):
        chunk = measured.chunk(layout.pairs, layout.retention, KEYS, seed=0)
        assert Buckets.of(shifted, chunk).pairs == list(layout.pairs)
    assert measured.binding()["bank"] != plain.binding()["bank"]


def test_a_call_that_was_held_up_is_left_out_whole(clock, bank):
    """One slow launch in twenty rounds: its call goes, and means of what stays add up."""
    measured = probe_on(clock, bank)
    launches = [len(layout.launches) for layout in measured.layouts(RETENTIONS, [1])]
    clock.hold_up = {sum(launches) * 5 + 2: 1e6}  # in the fifth round; the warm-up is the first
    points = measured.measure(KEYS, RETENTIONS, repeats=20, sizes=[1])
    assert max(point.mean_us for point in points) < 2 * (LAUNCH_US + SWITCH_US)


def test_skewed_spans_are_predicted_by_their_mean(clock, bank):
    """A launch in four takes nine times as long: the mean call is the sum of mean spans, not of medians."""
    measured = probe_on(clock, bank)
    draw = random.Random(3)
    clock.hold_up = {number: 8 * LAUNCH_US for number in range(10_000) if draw.random() < 0.25}
    points = measured.measure(KEYS, RETENTIONS, repeats=40, sizes=[1])
    profile = LatencyProfile(measured.binding(), tuple(points))
    launches = [profile.estimate_us(1, bucket, KEYS) for bucket in range(9)]
    assert sum(launches) / 9 == pytest.approx(SWITCH_US * 0.85 + LAUNCH_US * 3, rel=0.2)
    assert sum(point.median_us for point in points if point.stage == "estimate") < 0.6 * sum(launches)


def test_the_slowest_tenth_is_left_out():
    assert without_slowest([5.0, 1.0, 9.0], float) == [1.0, 5.0, 9.0]
    assert without_slowest([float(x) for x in range(20, 0, -1)], float) == [float(x) for x in range(1, 19)]
