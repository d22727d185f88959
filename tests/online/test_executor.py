"""Pipelines: the same keys and outputs as without one, errors that name stage and heads, and no thread left."""

import _thread
import copy as copies
import pickle
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError, StageError
from shadowattn.graphs import GraphBank, GraphForm, GraphShape, buckets
from shadowattn.kernels import choose
from shadowattn.online import executor
from shadowattn.online.channel import Channel
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.executor import Pool, Threads, batches, run_overlapped, run_serial
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.plan import Group, Plan
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.types import RetentionProfile, ScaleGrid
from tests.online.test_workers import interrupt_the_caller, late_and_interrupted
from tests.tensors import integer_qkv

HEADS, KV_HEADS, ROWS, KEYS, DIM = 6, 2, 32, 160, 16
GRID = ScaleGrid((0.01, 0.012, 0.02), (0.012, 0.015, 0.02))


@pytest.fixture(scope="module")
def bank():
    profile = RetentionProfile(((0.2,) * HEADS,), GRID, DIM, "", "", "")
    return GraphBank.build(profile, tuple(GraphShape(count, ROWS, DIM, KEYS) for count in (1, 2)))


def make_stages(estimator, *, query_block: int = 1, kernel: str = "auto", seed: int = 0) -> Stages:
    """Small integers, so that scores are exact in any order of summation; heads of different sizes fall into several buckets."""
    q, k, v = integer_qkv(HEADS, KV_HEADS, ROWS, KEYS, DIM, seed=seed)
    q *= torch.arange(1, HEADS + 1)[:, None, None] / 2
    if isinstance(estimator, type):
        estimator = estimator.of(q, k)
    chunk = Chunk.of(q, k, v, retention=torch.linspace(0.1, 0.6, HEADS, dtype=torch.float64), layer=3)
    return Stages(chunk, Parts(estimator, Rule(query_block), choose(kernel, head_dim=DIM, dtype=q.dtype)))


def with_parts(stages: Stages, **changes) -> Stages:
    """The same chunk with another estimator or other kernels."""
    parts = {"estimator": stages.estimator, "rule": stages.rule, "kernels": stages.kernels} | changes
    return Stages(stages.chunk, Parts(**parts))


@dataclass
class Backwards:
    """A scheduler for tests: everything the other way round."""

    def plan(self, work):
        return Plan(tuple(reversed(range(len(work.launches)))), tuple(reversed(range(len(work.select_us)))))


def threads_alive() -> int:
    return len(sys._current_frames())


def assert_alive(threads: int) -> None:
    """The last step of a thread is after the last of its work."""
    until = time.monotonic() + 5
    while threads_alive() > threads and time.monotonic() < until:
        time.sleep(1e-3)
    assert threads_alive() <= threads


def estimators(bank) -> dict:
    return {"int8": Int8Graph(bank), "int8_tensor": Int8Tensor, "int8_fused": Int8Fused, "oracle": Oracle()}


def assert_same(ran, stages: Stages) -> None:
    plain = Pipeline("batched").run(stages, keep_lists=True)
    assert ran.selected.indices.equal(plain.selected.indices)
    assert ran.selected.indptr.equal(plain.selected.indptr)
    torch.testing.assert_close(ran.out, plain.out, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("query_block", [1, 8])
@pytest.mark.parametrize("name", ["int8", "int8_tensor", "int8_fused", "oracle"])
@pytest.mark.parametrize("mode", ["serial", "overlap", "grouped"])
def test_every_mode_selects_what_the_plain_path_selects(bank, mode, name, query_block, kernel):
    stages = make_stages(estimators(bank)[name], query_block=query_block, kernel=kernel)
    if mode == "grouped" and name == "int8_fused":
        with pytest.raises(InputError, match="no scores to launch for"):
            Pipeline(mode).run(stages, keep_lists=True)
        return
    pipeline = Pipeline(mode)
    for _ in range(2):  # the second time with memory that the first has left
        assert_same(pipeline.run(stages, keep_lists=True), stages)


@given(data=st.data())
def test_any_order_of_launches_and_heads_selects_the_same(bank, data):
    stages = make_stages(Int8Graph(bank))
    launches = data.draw(st.permutations(stages.launches()))
    order = data.draw(st.permutations(range(HEADS)))
    budgets = st.sampled_from([None, 1, 2])
    threads = Threads(*(data.draw(budgets) for _ in range(3)))
    queue_heads = data.draw(st.integers(1, HEADS))
    pool = Counting()
    ran = run_overlapped(stages, launches, order, threads=threads, queue_heads=queue_heads, keep_lists=True, pool=pool)
    assert_same(ran, stages)
    assert pool.most <= most_copies(launches, order, queue_heads)


class Interruption(BaseException):
    """Like KeyboardInterrupt, which pytest would take for its own."""


@dataclass
class Failing:
    """Wraps an estimator or kernels; one of their methods fails for one head."""

    wrapped: object
    method: str
    error: BaseException
    calls_left: int

    def __getattr__(self, name):
        method = getattr(self.wrapped, name)

        def call(*arguments, **options):
            self.calls_left -= 1
            if self.calls_left < 0:
                raise self.error
            return method(*arguments, **options)

        return call if name == self.method else method


@pytest.mark.parametrize("calls", [0, 2, HEADS - 1])
@pytest.mark.parametrize("mode", ["serial", "overlap"])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (ZeroDivisionError("nought"), StageError, "failed: ZeroDivisionError: nought"),
        (InputError("expected one, got two"), InputError, ": expected one, got two"),
        (Interruption(), Interruption, ""),
    ],
)
@pytest.mark.parametrize("stage", ["estimate", "select", "attend"])
def test_a_failing_stage_stops_all_and_says_where(stage, error, raised, message, mode, calls):
    stages = make_stages(Oracle())
    part, method = ("estimator", "launch") if stage == "estimate" else ("kernels", stage)
    broken = with_parts(stages, **{part: Failing(getattr(stages, part), method, error, calls)})
    before, torch_threads = threads_alive(), torch.get_num_threads()
    pipeline = Pipeline(mode, queue_heads=1)
    with pytest.raises(raised) as caught:
        pipeline.run(broken, keep_lists=False)
    assert_alive(before)
    assert torch.get_num_threads() == torch_threads
    where = f"{stage} of head {calls} in layer 3"
    if raised is Interruption:
        assert caught.value is error
        assert error.__notes__[-1] == f"in {where}"
    else:
        assert str(caught.value) == f"{where}{' ' if raised is StageError else ''}{message}"
        assert caught.value.__cause__ is error
    assert_same(pipeline.run(stages, keep_lists=True), stages)  # and the pipeline still works


@dataclass
class Watched:
    """Wraps an estimator or kernels; `watch(method, call)` comes before each call of theirs, `at_work` counts those under way."""

    wrapped: object
    watch: Callable[[str, int], None]

    def __post_init__(self):
        self.calls, self.at_work = Counter(), 0

    def __getattr__(self, name):
        method = getattr(self.wrapped, name)
        if name not in ("launch", "select", "attend"):
            return method
        name = "estimate" if name == "launch" else name

        def call(*arguments, **options):
            self.at_work += 1
            self.calls[name] += 1
            self.watch(name, self.calls[name] - 1)
            try:
                return method(*arguments, **options)
            finally:
                self.at_work -= 1

        return call


def watched(stages: Stages, watch) -> Stages:
    return with_parts(stages, estimator=Watched(stages.estimator, watch), kernels=Watched(stages.kernels, watch))


def test_an_interrupted_start_leaves_nothing_at_work(monkeypatch):
    stages = watched(make_stages(Oracle()), lambda method, call: None)
    before = threads_alive()
    monkeypatch.setattr(_thread, "start_new_thread", late_and_interrupted)
    with pytest.raises(KeyboardInterrupt):
        Pipeline("overlap").run(stages, keep_lists=False)
    assert_alive(before)
    assert not stages.estimator.calls


def interrupted_after(error: BaseException):
    """What watches a chunk whose attention raises `error`, and whose second estimate then interrupts the caller and goes on."""
    raising = threading.Event()

    def watch(method, call):
        if method == "attend":
            raising.set()
            raise error
        if method == "estimate" and call == 1:
            assert raising.wait(10)
            time.sleep(0.1)
            interrupt_the_caller()
            time.sleep(0.2)

    return watch


def test_a_second_interruption_waits_for_the_stages_too():
    interruption = Interruption()
    stages = watched(make_stages(Oracle()), interrupted_after(interruption))
    before = threads_alive()
    with pytest.raises(Interruption) as caught:
        Pipeline("overlap").run(stages, keep_lists=False)
    assert caught.value is interruption
    assert stages.estimator.calls["estimate"] == 2
    assert not stages.estimator.at_work
    assert_alive(before)


def test_an_interruption_while_a_failure_is_cleaned_up_is_not_lost():
    stages = watched(make_stages(Oracle()), interrupted_after(ZeroDivisionError()))
    with pytest.raises(KeyboardInterrupt):
        Pipeline("overlap").run(stages, keep_lists=False)


@pytest.fixture
def torch_threads():
    """More than the budgets of the tests, and than most machines have cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield 5
    torch.set_num_threads(before)


@pytest.mark.parametrize("mode", ["serial", "overlap"])
@pytest.mark.parametrize("budgets", [(1, 2, 3), (2, 1, 4), (1, None, 2), (None, 1, None)])
def test_each_stage_runs_on_its_budget(torch_threads, budgets, mode):
    stages = make_stages(Oracle())
    seen, second_estimate, first_select = defaultdict(set), threading.Event(), threading.Event()

    def watch(method, call):
        if mode == "overlap" and (method, call) == ("select", 0):  # asks for the first time when the estimate has set its budget
            second_estimate.wait(5)
        seen[method].add(torch.get_num_threads())
        if mode == "overlap" and (method, call) == ("estimate", 1):
            second_estimate.set()
            first_select.wait(5)
        if method == "select":
            first_select.set()

    launches = [Group((head,)) for head in range(HEADS)]
    how = {"threads": Threads(*budgets), "keep_lists": False, "pool": Pool()}
    if mode == "serial":
        run_serial(watched(stages, watch), launches, **how)
    else:
        run_overlapped(watched(stages, watch), launches, range(HEADS), queue_heads=2, **how)
    wanted = dict(zip(("estimate", "select", "attend"), budgets, strict=True))
    assert seen == {stage: {budget or torch_threads} for stage, budget in wanted.items()}
    assert torch.get_num_threads() == torch_threads
    assert threads_of_a_new_thread() == torch_threads


def threads_of_a_new_thread() -> int:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_an_interrupted_end_of_a_budget_is_made_up_for(torch_threads, monkeypatch):
    """Of attention's, the one in the calling thread."""
    caller, calls, set_num_threads = threading.get_ident(), [], torch.set_num_threads

    def interrupted(threads):
        if threading.get_ident() == caller:
            calls.append(threads)
            if len(calls) == 2:
                raise KeyboardInterrupt
        set_num_threads(threads)

    monkeypatch.setattr(torch, "set_num_threads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Pipeline("overlap", threads=Threads(1, 1, 1)).run(make_stages(Oracle()), keep_lists=False)
    assert calls[:2] == [1, torch_threads]
    assert torch.get_num_threads() == torch_threads


class Counting(Pool):
    """Counts the memories that have not been given back."""

    def __init__(self):
        super().__init__()
        self.alive = self.most = 0
        self._counted = threading.Lock()

    def take(self, nbytes):
        with self._counted:
            self.alive += 1
            self.most = max(self.most, self.alive)
        return super().take(nbytes)

    def give_back(self, scores):
        with self._counted:
            self.alive -= 1
        super().give_back(scores)


def most_copies(launches: list[Group], order: list[int], queue_heads: int) -> int:
    """As `run_overlapped` says: in the queue, being selected, and launched before their turn."""
    launched, handed_on, waiting = set(), 0, 0
    for group in launches:
        launched |= set(group.heads)
        waiting = max(waiting, len(launched) - handed_on)
        while handed_on < len(order) and order[handed_on] in launched:
            handed_on += 1
    return queue_heads + 1 + waiting


@pytest.mark.parametrize("queue_heads", [1, 2])
def test_scores_alive_are_bounded_where_heads_go_in_the_order_of_launches(bank, queue_heads):
    stages, pool = make_stages(Int8Graph(bank)), Counting()

    def until_the_estimate_is_ahead(method: str, call: int) -> None:
        """Selection waits until the estimate has run ahead as far as it may; ten seconds, should it never."""
        deadline = time.monotonic() + 10
        while method == "select" and pool.most < queue_heads + 2 and time.monotonic() < deadline:
            time.sleep(0.001)

    stages = with_parts(stages, kernels=Watched(stages.kernels, until_the_estimate_is_ahead))
    launches = [Group((head,), group.bucket) for group in stages.launches() for head in group.heads]
    order = [head for group in launches for head in group.heads]
    run_overlapped(stages, launches, order, threads=Threads(1, 1, 1), queue_heads=queue_heads, keep_lists=False, pool=pool)
    assert pool.most == most_copies(launches, order, queue_heads) == queue_heads + 2 < HEADS
    assert pool.alive == 0


def test_an_order_that_begins_with_the_last_launch_keeps_every_head(bank):
    stages, pool = make_stages(Int8Graph(bank)), Counting()
    launches = [Group((head,), group.bucket) for group in stages.launches() for head in group.heads]
    order = [head for group in reversed(launches) for head in group.heads]
    ran = run_overlapped(stages, launches, order, threads=Threads(1, 1, 1), queue_heads=1, keep_lists=True, pool=pool)
    assert_same(ran, stages)
    assert pool.most == HEADS
    assert pool.alive == 0


def test_nan_is_an_input_error_in_every_mode(bank):
    stages = make_stages(Int8Graph(bank))
    stages.chunk.k[0, 5, 0] = torch.nan
    for mode in ("serial", "overlap", "grouped"):
        with pytest.raises(InputError, match="NaN"):
            Pipeline(mode).run(stages, keep_lists=False)


def test_workers_inherit_torchs_modes():
    """A worker that computed gradients would hold every score of the prompt."""
    stages = make_stages(Oracle())
    stages.chunk.q.requires_grad_()
    with torch.no_grad():
        assert not Pipeline("overlap").run(stages, keep_lists=False).out.requires_grad


def test_the_pool_keeps_the_largest_memory():
    """A second prompt starts with short chunks again."""
    pool, seen = Pool(), []
    for keys in (64, 16, 64):
        for dtype in (torch.float32, torch.float16, torch.int8):
            scores = torch.arange(2 * keys).view(1, 2, keys).to(dtype)
            copy = pool.copy(scores)
            assert copy.equal(scores)
            assert copy.dtype == dtype
            seen.append(copy.data_ptr())
            pool.give_back(copy)
    assert len(set(seen)) == 1


@pytest.mark.parametrize("query_block", [1, 8])
@pytest.mark.parametrize("form", [None, GraphForm("static"), GraphForm("unit"), GraphForm("runtime")])
def test_scores_of_one_head_are_computed_into_the_pools_memory(monkeypatch, form, query_block):
    """By a graph of more rows and keys than are asked for, too: there is room for what it computes."""
    estimator = Int8Tensor
    if form is not None:
        profile = RetentionProfile(((0.2,) * HEADS,), GRID, DIM, "", "", "")
        estimator = Int8Graph(GraphBank.build(profile, (GraphShape(1, ROWS + 3, DIM, KEYS + 7),), form=form))
    stages, pipeline = make_stages(estimator, query_block=query_block), Pipeline("overlap")
    monkeypatch.setattr(Pool, "copy", lambda *_: pytest.fail("copied"))
    for _ in range(2):
        ran = pipeline.run(stages, keep_lists=True)
    monkeypatch.undo()
    assert_same(ran, stages)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("query_block", [1, 8])
def test_lists_that_nobody_keeps_share_memory(bank, monkeypatch, query_block, kernel):
    stages, given = make_stages(Int8Graph(bank), query_block=query_block, kernel=kernel), []
    plain = Pipeline("batched").run(stages, keep_lists=True)
    pipeline, take = Pipeline("overlap"), Pool.take
    pipeline._list_pool = Counting()
    monkeypatch.setattr(Pool, "take", lambda pool, nbytes: given.append((pool, nbytes)) or take(pool, nbytes))
    for _ in range(2):
        ran = pipeline.run(stages, keep_lists=False)
        torch.testing.assert_close(ran.out, plain.out, atol=1e-6, rtol=1e-6)
        assert ran.selected == plain.selected.kept()
    lengths = [stages.listed(slice(head, head + 1)) for head in range(HEADS)]
    assert [nbytes for pool, nbytes in given if pool is pipeline._list_pool] == 2 * [4 * length for length in lengths]
    assert pipeline._list_pool.alive == 0
    assert pipeline._list_pool.most <= 4  # one being made, two in the queue, one being read
    kept = pipeline.run(stages, keep_lists=True)
    pipeline.run(make_stages(Int8Graph(bank), query_block=query_block, kernel=kernel, seed=1), keep_lists=False)
    assert kept.selected.indices.equal(plain.selected.indices)


def test_no_other_device_than_a_cpu_is_given_memory_for_scores(bank, monkeypatch):
    stages, alone = make_stages(Int8Graph(bank)), Group((0,), 0)
    assert stages.room(alone) == 4 * ROWS * KEYS
    assert stages.room(Group((0, 1), 0)) is None
    monkeypatch.setattr(bank, "device", "NPU")
    assert stages.room(alone) is None


def test_scores_that_are_elsewhere_than_it_was_told_are_refused():
    class Elsewhere(Int8Tensor):
        room = Int8Tensor.room

        def launch(self, chunk, group, *, out=None):
            return super().launch(chunk, group)

    with pytest.raises(InputError, match="Elsewhere: expected scores in the memory that launch got as out, got them in other"):
        Pipeline("overlap").run(make_stages(Elsewhere), keep_lists=True)


@pytest.mark.parametrize("query_block", [1, 8])
def test_few_heads_scores_are_alive_where_none_may_wait(monkeypatch, query_block):
    """One being selected, one in the estimate's hand, though scores of exact products are of nobody's memory."""
    monkeypatch.setattr(executor, "_WAITING_BYTES", 0)
    stages, deadline = make_stages(ScoresAlive(), query_block=query_block), time.monotonic() + 10

    def until_the_estimate_is_ahead(method: str, call: int) -> None:
        while method == "select" and len(stages.estimator.launched) < min(call + 2, HEADS) and time.monotonic() < deadline:
            time.sleep(0.001)

    ahead = with_parts(stages, kernels=Watched(stages.kernels, until_the_estimate_is_ahead))
    Pipeline("overlap").run(ahead, keep_lists=False)
    assert max(stages.estimator.alive) == 1  # when the next one begins


def test_a_launch_of_ones_own_is_not_told_where_to_compute():
    """Be it the class's, or that of one which it derives from beside ours."""

    class Doubles:
        def launch(self, chunk, group):
            return 2 * super().launch(chunk, group)

    class Doubled(Int8Tensor):
        def launch(self, chunk, group):
            return 2 * super().launch(chunk, group)

    class Mixed(Doubles, Int8Tensor):
        pass

    class Unused(Int8Tensor, Doubles):
        pass

    for estimator in (Doubled, Mixed, Unused):
        stages = make_stages(estimator)
        assert (stages.room(Group((0,))) is None) == (estimator is not Unused)
        assert_same(Pipeline("grouped").run(stages, keep_lists=True), stages)


@pytest.mark.parametrize("limit", ["_WAITING_BYTES", "_LIST_BYTES"])
@pytest.mark.parametrize("mode", ["overlap", "grouped"])
def test_no_heads_wait_whose_scores_or_lists_are_large(mode, limit, monkeypatch):
    """What a queue of no room does not hold: every head is handed over, and the order stays."""
    stages, most, rooms = make_stages(Int8Tensor), 4 * ROWS * KEYS, []
    longest = 4 * max(stages._lists[head : head + 1].size for head in range(HEADS))
    monkeypatch.setattr(executor, "Channel", lambda capacity: rooms.append(capacity) or Channel(capacity))
    for room in (0, 1, 5):
        monkeypatch.setattr(executor, limit, room * {"_WAITING_BYTES": most, "_LIST_BYTES": longest}[limit])
        assert_same(Pipeline(mode).run(stages, keep_lists=True), stages)
        scores, lists = rooms[-2:]
        assert (scores if limit == "_WAITING_BYTES" else lists) == min(2, room)
        assert (lists if limit == "_WAITING_BYTES" else scores) == 2


def test_what_waits_counts_with_the_padding_that_it_has_room_for(monkeypatch):
    """A graph of more rows than the chunk has writes more than the chunk's scores."""
    profile = RetentionProfile(((0.2,) * HEADS,), GRID, DIM, "", "", "")
    stages, rooms = make_stages(Int8Graph(GraphBank.build(profile, (GraphShape(1, 3 * ROWS, DIM, KEYS),)))), []
    monkeypatch.setattr(executor, "Channel", lambda capacity: rooms.append(capacity) or Channel(capacity))
    for nbytes, room in ((2 * 3 * 4 * ROWS * KEYS, 2), (2 * 3 * 4 * ROWS * KEYS - 1, 1), (3 * 4 * ROWS * KEYS - 1, 0)):
        monkeypatch.setattr(executor, "_WAITING_BYTES", nbytes)
        assert_same(Pipeline("overlap").run(stages, keep_lists=True), stages)
        assert rooms[-2] == room


def test_kernels_that_put_lists_elsewhere_than_they_were_told_are_refused(bank):
    stages = make_stages(Int8Graph(bank))

    class Elsewhere:
        name, attend = "elsewhere", stages.kernels.attend

        def select(self, scores, lists, *, out=None):
            return stages.kernels.select(scores, lists)

    with pytest.raises(InputError, match=r"Elsewhere\.select: expected lists in the memory that it got as out"):
        Pipeline("overlap").run(with_parts(stages, kernels=Elsewhere()), keep_lists=False)


def test_a_copy_of_a_pipeline_has_memory_of_its_own(bank):
    pipeline, stages = Pipeline("overlap"), make_stages(Int8Graph(bank))
    pipeline.run(stages, keep_lists=False)
    for copy in (copies.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
        assert not copy._pool._free
        assert not copy._list_pool._free
        assert_same(copy.run(stages, keep_lists=True), stages)


def test_the_pools_memory_outlives_inference_mode():
    pool = Pool()
    with torch.inference_mode():
        pool.give_back(pool.copy(torch.zeros(1, 2, 3)))
    assert pool.copy(torch.ones(1, 2, 3)).equal(torch.ones(1, 2, 3))


@pytest.mark.parametrize("launches", [[Group((0, 1, 2))], [Group((0, 1, 2, 3, 4, 5)), Group((5,))]])
def test_a_plan_that_forgets_or_repeats_a_head_is_refused(launches):
    with pytest.raises(ValueError, match="each of 6 heads in one launch"):
        run_serial(make_stages(Oracle()), launches, threads=Threads(), keep_lists=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sideways"}, "expected one of batched, serial, overlap, grouped, planned, got 'sideways'"),
        ({"mode": "planned"}, r"expected a latency profile, got none; .*experiments.run \+exp=latency_profile"),
        ({"queue_heads": 0}, "queue_heads: expected an integer of 1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        Pipeline(**options)


def test_thread_budgets_are_checked():
    with pytest.raises(InputError, match="select_threads: expected an integer of 1"):
        Threads(select=0)


class ScoresAlive(Oracle):
    """Exact scores, and how many launches' scores are alive whenever one begins."""

    def __init__(self):
        object.__setattr__(self, "launched", [])
        object.__setattr__(self, "alive", [])

    def scores(self, chunk):
        self.alive.append(sum(ref() is not None for ref in self.launched))
        scores = super().scores(chunk)
        self.launched.append(weakref.ref(scores.untyped_storage()))
        return scores


@pytest.mark.parametrize(("min_budget", "heads"), [(1, 3), (KEYS // 2, 3), (KEYS, 2), (10 * KEYS, 2)])
def test_lists_of_a_least_budget_count_in_a_batchs_memory(monkeypatch, min_budget, heads):
    """Lists of two heads that keep every key fit, or of three that keep the largest retention, 0.6."""
    monkeypatch.setattr(executor, "_LIST_BYTES", 2 * 4 * ROWS * KEYS)
    stages = with_parts(make_stages(Int8Fused), rule=Rule(min_budget=min_budget))
    assert [len(group.heads) for group in batches(stages)] == [heads] * (HEADS // heads)


@pytest.mark.parametrize("query_block", [1, 8])
@pytest.mark.parametrize("limit", ["SCORE_BYTES", "_KEY_BYTES"])
def test_a_launch_holds_no_more_than_its_limit_and_leaves_before_the_next(monkeypatch, limit, query_block):
    whole = make_stages(Oracle(), query_block=query_block)
    expected = Pipeline("batched").run(whole, keep_lists=True)
    scores, keys = 4 * ROWS // query_block * KEYS, 4 * KEYS * DIM
    of, most_bytes = {"SCORE_BYTES": (buckets, 2 * scores), "_KEY_BYTES": (executor, keys)}[limit]
    monkeypatch.setattr(of, limit, most_bytes)
    stages = make_stages(ScoresAlive(), query_block=query_block)
    parts = batches(stages)
    most = 2 if limit == "SCORE_BYTES" else HEADS // KV_HEADS
    assert [len(group.heads) for group in parts] == [most] * (HEADS // most)
    ran = Pipeline("batched").run(stages, keep_lists=True)
    assert stages.estimator.alive == [0] * len(parts)
    assert ran.selected.indices.equal(expected.selected.indices)
    assert ran.out.equal(expected.out)
