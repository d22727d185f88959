"""Latency profiles: what they interpolate, what they refuse, and that a measured one fits the pipeline it was measured for."""

import hashlib
import json
import math
from dataclasses import asdict, replace
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank, GraphShape, buckets
from shadowattn.kernels import native
from shadowattn.online import pipeline as pipelines
from shadowattn.online.cache import LayerCache
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.executor import Threads
from shadowattn.online.latency import Latency, LatencyProfile
from shadowattn.online.latency_profiler import LatencyProfiler
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.plan import Group, Plan
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.types import RetentionProfile, ScaleGrid
from tests.online.test_executor import (
    DIM,
    GRID,
    HEADS,
    KEYS,
    KV_HEADS,
    ROWS,
    Backwards,
    assert_same,
    bank,
    make_stages,
    with_parts,
)

__all__ = ["bank"]  # the fixture

THREADS = Threads(1, 1, 1)
RETENTIONS = (0.1, 0.3, 0.6)


def linear_profile() -> LatencyProfile:
    """Launches cost 100 µs a head of capacity 256 and 200 of 512, and a hundredth a key; heads 1 µs a hundred keys kept."""
    points = []
    for keys in (128, 256, 384, 512):
        capacity = 256 if keys <= 256 else 512
        for heads in (1, 2):
            for bucket in (0, 1):
                cost = heads * capacity / 2.56 + keys / 100 + bucket
                points.append(Latency("estimate", heads, bucket, capacity, 1.0, keys, cost, cost, cost + 1, 9))
        for retention in (0.1, 0.2, 0.4, 1.0):
            for stage, factor in (("select", 1), ("attend", 2)):
                cost = factor * retention * keys
                points.append(Latency(stage, 1, -1, 0, retention, keys, cost, cost, 2 * cost, 9))
    return LatencyProfile({"processor": "abacus", "cores": 2}, tuple(points))


def test_work_is_linear_between_points_and_a_step_between_capacities():
    groups = [Group((0, 2), 1), Group((1,), 0)]
    work = linear_profile().work(groups, (0.1, 0.3, 0.7), keys=192)
    assert [launch.heads for launch in work.launches] == [(0, 2), (1,)]
    np.testing.assert_allclose([launch.estimate_us for launch in work.launches], [202.92, 101.92])
    np.testing.assert_allclose(work.select_us, [19.2, 57.6, 134.4])
    np.testing.assert_allclose(work.attend_us, [38.4, 115.2, 268.8])
    assert linear_profile().estimate_us(1, 0, 256) == pytest.approx(102.56)
    assert linear_profile().estimate_us(1, 0, 257) == pytest.approx(203.84)  # the next graph, at its shortest measured keys


def test_a_launch_without_measurements_of_its_own_takes_the_next_larger():
    profile = linear_profile()
    lean = LatencyProfile(profile.binding, tuple(p for p in profile.points if p.heads == 2 or p.stage != "estimate"))
    assert lean.estimate_us(1, 0, 256) == profile.estimate_us(2, 0, 256)


@pytest.mark.parametrize(
    ("groups", "retention", "keys"),
    [
        ([Group((0,), 0)], (0.2,), 513),
        ([Group((0,), 2)], (0.2,), 128),
        ([Group((0, 1, 2), 0)], (0.2,) * 3, 128),
        ([Group((0,), 0)], (0.05,), 128),
    ],
)
def test_nothing_is_said_beyond_what_was_measured(groups, retention, keys):
    with pytest.raises(InputError, match=r"measured up to 512 keys at retentions \[0.1, 0.2, 0.4, 1.0\], asked for .*\+exp=lat"):
        linear_profile().work(groups, retention, keys=keys)


def test_errors_of_interpolation_leave_each_inner_point_out():
    profile = linear_profile()
    assert {(e.stage, e.axis) for e in profile.errors()} == {
        ("select", "keys"), ("attend", "keys"), ("select", "retention"), ("attend", "retention"),
    }  # fmt: skip  # two points a capacity: no inner one
    assert all(error.worst < 1e-12 for error in profile.errors())
    bent = tuple(replace(p, mean_us=1.5 * p.mean_us) if (p.stage, p.keys) == ("attend", 256) else p for p in profile.points)
    errors = {(e.stage, e.axis): e for e in LatencyProfile({}, bent).errors()}
    assert errors["attend", "keys"].worst == pytest.approx(1 / 3)  # 384 instead of 256, predicted 256
    assert errors["select", "keys"].worst < 1e-12


def test_a_profile_survives_its_file(tmp_path):
    profile = linear_profile()
    assert LatencyProfile.load(profile.save(tmp_path / "profile.json")) == profile


def test_damaged_files_are_refused_with_the_remedy(tmp_path):
    path = linear_profile().save(tmp_path / "profile.json")
    whole = path.read_text()
    stored = json.loads(whole)
    stored["profile"]["points"][0]["mean_us"] = 1.0
    damages = {
        "cannot be read": whole[: len(whole) // 2],
        "altered since": json.dumps(stored),
        "schema version 3, got 2": whole.replace('"schema_version": 3', '"schema_version": 2'),
    }
    for reason, text in damages.items():
        path.write_text(text)
        with pytest.raises(InputError, match=rf"{reason}.*experiments\.run \+exp=latency_profile"):
            LatencyProfile.load(path)
    with pytest.raises(InputError, match="cannot be read"):
        LatencyProfile.load(tmp_path / "nowhere.json")


POINT = asdict(Latency("select", 1, -1, 0, 0.5, 64, 2.0, 2.0, 3.0, 9))
WRONG = [
    {"mean_us": math.nan}, {"mean_us": math.inf}, {"mean_us": "2.0"}, {"mean_us": None}, {"median_us": -0.5},
    {"p95_us": math.nan}, {"keys": "64"}, {"keys": 0.5}, {"retention": None}, {"stage": "rest"}, {"stage": 1}, {"mode": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"points": []},
        {"binding": 3, "points": []},
        {"binding": {}, "points": 7},
        {"binding": {}, "points": [7]},
        {"binding": {}, "points": [{"stage": "select"}]},
        *({"binding": {}, "points": [POINT | wrong]} for wrong in WRONG),
    ],
)
def test_a_file_of_another_content_is_refused_with_the_remedy(tmp_path, content):
    """Whoever wrote it also wrote the checksum."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"schema_version": 3, "sha256": digest, "profile": content}))
    with pytest.raises(InputError, match=r"not the content of one .*experiments\.run \+exp=latency_profile"):
        LatencyProfile.load(path)


@pytest.mark.parametrize("missing", [("estimate",), ("select",), ("attend",), ("estimate", "select", "attend")])
def test_a_profile_without_a_stage_is_refused_with_the_remedy(missing):
    profile = linear_profile()
    lean = LatencyProfile(profile.binding, tuple(p for p in profile.points if p.stage not in missing))
    with pytest.raises(InputError, match=r"asked for .*experiments\.run \+exp=latency_profile"):
        lean.work([Group((0,), 0)], (0.2,), keys=128)


def test_a_curve_that_ends_early_bounds_what_is_said():
    profile = linear_profile()
    lean = LatencyProfile(
        profile.binding, tuple(p for p in profile.points if (p.stage, p.retention, p.keys) != ("attend", 0.4, 512))
    )
    with pytest.raises(InputError, match="asked for attend of retention"):
        lean.work([Group((0,), 0)], (0.2,), keys=500)


def on(stages: Stages, chunk: Chunk) -> Stages:
    """The same parts on another chunk."""
    return Stages(chunk, Parts(stages.estimator, stages.rule, stages.kernels))


def probe_of(stages, **changes) -> LatencyProfiler:
    options = {"estimator": stages.estimator, "rule": stages.rule, "kernels": stages.kernels, "threads": THREADS}
    return LatencyProfiler(HEADS, KV_HEADS, DIM, ROWS, stages.chunk.q.dtype, **options | changes)


def measured(stages, **changes) -> LatencyProfile:
    probe = probe_of(stages, **changes)
    return LatencyProfile(probe.binding(), tuple(probe.measure(KEYS, RETENTIONS, repeats=3)))


def test_the_probe_measures_every_launch_and_retention(bank):
    profile = measured(make_stages(Int8Graph(bank)))
    estimates = {(p.heads, p.bucket, p.capacity) for p in profile.points if p.stage == "estimate"}
    assert estimates == {(size, bucket, KEYS) for size in (1, 2) for bucket in range(9)}
    for stage in ("select", "attend"):
        assert {p.retention for p in profile.points if p.stage == stage} == set(RETENTIONS)
    assert all(0 < p.median_us <= p.p95_us and p.mean_us > 0 and p.n >= 3 for p in profile.points)


def test_key_lengths_cover_both_ends_of_every_capacity(bank):
    lengths = probe_of(make_stages(Oracle())).key_lengths(300)
    assert lengths[0] == ROWS
    assert lengths[-1] == 300
    assert {64, 96, 128, 160, 256, 288} <= set(lengths)  # steps of doubling: 32, 64, 128, 256
    assert probe_of(make_stages(Int8Graph(bank))).key_lengths(KEYS)[-1] == KEYS


def test_planned_runs_what_the_scheduler_says(bank):
    stages = make_stages(Int8Graph(bank))
    pipeline = Pipeline("planned", threads=THREADS, scheduler=Backwards(), profile=measured(stages))
    ran = pipeline.run(stages, keep_lists=True)
    assert_same(ran, stages)
    launched = [span.heads for span in ran.timeline.spans if span.stage == "estimate"]
    assert launched == [group.heads for group in reversed(stages.launches())]
    for stage in ("select", "attend"):
        assert [span.heads for span in ran.timeline.spans if span.stage == stage] == [(h,) for h in reversed(range(HEADS))]


class InTurns:
    """The last launch first, and a head of every launch, then the next of each."""

    def plan(self, work):
        turns = zip_longest(*(launch.heads for launch in work.launches))
        return Plan(tuple(reversed(range(len(work.launches)))), tuple(h for turn in turns for h in turn if h is not None))


def test_heads_of_a_launch_stay_together_where_all_scores_would_be_large(bank, monkeypatch):
    stages = make_stages(Oracle())
    launches = [group.heads for group in stages.launches()]
    assert launches == [(0, 1, 2), (3, 4, 5)]
    planned = Pipeline("planned", threads=THREADS, scheduler=InTurns(), profile=measured(stages))
    for most, heads in ((4 * ROWS * KEYS * HEADS, [0, 3, 1, 4, 2, 5]), (4 * ROWS * KEYS * HEADS - 1, list(range(HEADS)))):
        monkeypatch.setattr(pipelines, "_MOST_SCORE_BYTES", most)
        ran = planned.run(stages, keep_lists=True)
        assert_same(ran, stages)
        assert [span.heads for span in ran.timeline.spans if span.stage == "estimate"] == launches  # as they are wanted
        assert [span.heads for span in ran.timeline.spans if span.stage == "attend"] == [(head,) for head in heads]


@pytest.mark.parametrize("heads", [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5, 5), (0, 1, 2, 3, 4, 6)])
def test_a_plan_of_other_heads_is_refused(monkeypatch, heads):
    stages = make_stages(Oracle())
    scheduler = SimpleNamespace(plan=lambda work: Plan((0, 1), heads))
    planned = Pipeline("planned", threads=THREADS, scheduler=scheduler, profile=measured(stages))
    for most in (0, 1 << 30):
        monkeypatch.setattr(pipelines, "_MOST_SCORE_BYTES", most)
        with pytest.raises(InputError, match="plan: expected an order of 6 heads, got"):
            planned.run(stages, keep_lists=True)


@pytest.mark.parametrize("mode", ["batched", "serial", "overlap", "grouped", "planned"])
def test_heads_share_launches_where_the_bank_has_room_for_them(mode, bank):
    """Graphs of two heads up to half of the keys: a chunk beyond these runs head by head, and is planned so."""
    profile = RetentionProfile(((0.2,) * HEADS,), GRID, DIM, "", "", "")
    shapes = (GraphShape(1, ROWS, DIM, KEYS // 2), GraphShape(1, ROWS, DIM, KEYS), GraphShape(2, ROWS, DIM, KEYS // 2))
    stages = make_stages(Int8Graph(GraphBank.build(profile, shapes)))
    q, k, v = (x[:, : KEYS // 2] for x in (stages.chunk.q, stages.chunk.k, stages.chunk.v))
    short, probe = on(stages, Chunk.of(q, k, v, retention=stages.chunk.retention)), probe_of(stages)
    points = [point for keys in probe.key_lengths(KEYS) for point in probe.measure(keys, RETENTIONS, repeats=1)]
    times = LatencyProfile(probe.binding(), tuple(points))
    pipeline = Pipeline(mode, threads=THREADS, scheduler=Backwards(), profile=times)
    for some, most in ((short, 2), (stages, 1)):
        assert max(len(group.heads) for group in some.launches()) == most
        assert_same(pipeline.run(some, keep_lists=True), with_parts(some, estimator=Int8Graph(bank)))


def test_heads_of_a_key_head_go_alone_where_their_scores_are_too_many(monkeypatch):
    stages = make_stages(Oracle())
    monkeypatch.setattr(buckets, "SCORE_BYTES", 3 * 4 * ROWS * KEYS)
    assert [group.heads for group in stages.launches()] == [(0, 1, 2), (3, 4, 5)]
    profile = measured(stages)
    monkeypatch.setattr(buckets, "SCORE_BYTES", 3 * 4 * ROWS * KEYS - 1)
    assert [group.heads for group in stages.launches()] == [(head,) for head in range(HEADS)]
    for mode in ("grouped", "planned"):
        ran = Pipeline(mode, threads=THREADS, scheduler=Backwards(), profile=profile).run(stages, keep_lists=True)
        assert_same(ran, stages)


def test_a_ranking_that_heads_share_is_made_once_however_large(monkeypatch):
    class OfGroup(Oracle):
        granularity = "group"

        def scores(self, chunk):
            return torch.zeros(len(chunk.heads.grouped()), chunk.q.shape[1], chunk.keys)

    monkeypatch.setattr(buckets, "SCORE_BYTES", 0)
    assert [group.heads for group in make_stages(OfGroup()).launches()] == [(0, 1, 2), (3, 4, 5)]


def test_a_foreign_profile_is_refused(bank):
    stages = make_stages(Int8Graph(bank))
    profile = measured(stages)
    foreign = {
        "processor": replace(profile, binding=profile.binding | {"processor": "abacus"}),
        "bank": replace(profile, binding=profile.binding | {"bank": "0123"}),
        "kernels": replace(profile, binding=profile.binding | {"kernels": "native avx2 0123"}),
        "rows": replace(profile, binding=profile.binding | {"rows": ROWS // 2}),
    }
    for name, other in foreign.items():
        with pytest.raises(InputError, match=rf"measured with {name} .*, here it is .*\+exp=latency_profile"):
            Pipeline("planned", threads=THREADS, scheduler=Backwards(), profile=other).run(stages, keep_lists=False)
    with pytest.raises(InputError, match="measured with estimate_threads 1, here it is 2"):
        Pipeline("planned", threads=Threads(2, 1, 1), scheduler=Backwards(), profile=profile).run(stages, keep_lists=False)


def other_bank() -> GraphBank:
    grid = ScaleGrid((0.01, 0.012, 0.03), (0.012, 0.015, 0.02))
    return GraphBank.build(RetentionProfile(((0.2,) * HEADS,), grid, DIM, "", "", ""), (GraphShape(1, ROWS, DIM, KEYS),))


FOREIGN = {
    "kernels": lambda chunk: {"kernels": SimpleNamespace(name="abacus")},
    "estimator": lambda chunk: {"estimator": Oracle()},
    "bank": lambda chunk: {"estimator": Int8Graph(other_bank())},
    "heads": lambda chunk: {"q": torch.cat([chunk.q, chunk.q])},
    "kv_heads": lambda chunk: {"k": chunk.k[:1]},
    "rows": lambda chunk: {"q": torch.cat([chunk.q, chunk.q], 1)},
    "head_dim": lambda chunk: {"q": chunk.q[..., : DIM // 2]},
    "dtype": lambda chunk: {"q": chunk.q.bfloat16()},
    "query_block": lambda chunk: {"rule": Rule(8)},
    "block_score": lambda chunk: {"rule": Rule(block_score="max")},
    "sinks": lambda chunk: {"rule": Rule(sinks=2)},
    "recent": lambda chunk: {"rule": Rule(recent=2)},
}


@pytest.fixture
def planned(bank):
    """A chunk, and a pipeline that has run it."""
    stages = make_stages(Int8Graph(bank))
    pipeline = Pipeline("planned", threads=THREADS, scheduler=Backwards(), profile=measured(stages))
    pipeline.run(stages, keep_lists=False)
    return stages, pipeline


@pytest.mark.parametrize("name", FOREIGN)
def test_a_pipeline_that_has_run_still_refuses_what_it_was_not_measured_for(planned, name):
    stages, pipeline = planned
    changed = FOREIGN[name](stages.chunk)
    parts = set(changed) <= {"estimator", "rule", "kernels"}
    foreign = with_parts(stages, **changed) if parts else on(stages, replace(stages.chunk, **changed, cache=LayerCache()))
    with pytest.raises(InputError, match=rf"measured with {name} .*, here it is .*\+exp=latency_profile"):
        pipeline.run(foreign, keep_lists=False)
    assert_same(pipeline.run(stages, keep_lists=True), stages)


@pytest.mark.parametrize("stage", ["estimate", "select", "attend"])
def test_a_pipeline_that_has_run_still_refuses_other_threads(planned, stage):
    stages, pipeline = planned
    pipeline.threads = replace(THREADS, **{stage: 2})
    with pytest.raises(InputError, match=f"measured with {stage}_threads 1, here it is 2"):
        pipeline.run(stages, keep_lists=False)


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not built")
def test_a_pipeline_that_has_run_still_refuses_another_instruction_set(planned):
    stages, pipeline = planned
    if len(native.levels()) == 1:
        pytest.skip("this processor has only the portable instruction set")
    with native.forced_level("portable"), pytest.raises(InputError, match=r"measured with kernels native .*is native portable"):
        pipeline.run(stages, keep_lists=False)


def test_a_profile_also_holds_for_fewer_rows_and_heads(planned):
    """A last chunk is shorter, and some of a layer's heads may go dense."""
    stages, pipeline = planned
    chunk = stages.chunk
    few, rows = [0, 1, 4], ROWS // 2
    fewer = {"q": chunk.q[few], "retention": chunk.retention[few], "heads": chunk.heads[torch.tensor(few)]}
    shorter = {"q": chunk.q[:, :rows], "k": chunk.k[:, :-rows], "v": chunk.v[:, :-rows], "positions": chunk.positions[:rows]}
    for change in (fewer, shorter):
        part = on(stages, replace(chunk, **change, cache=LayerCache()))
        assert_same(pipeline.run(part, keep_lists=True), part)


def test_an_estimator_that_selects_has_nothing_to_plan():
    with pytest.raises(InputError, match="Int8Fused selects while it estimates"):
        probe_of(make_stages(Oracle()), estimator=Int8Fused.of(*torch.ones(2, 1, 1, DIM)))
