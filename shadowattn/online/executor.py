"""Runs a chunk's heads through its stages: many at once, one after another, or each stage in a thread of its own.

The stages are generators that feed on one another, some heads at a time. Chained they run one after the other; with a channel
between two of them they overlap. Whichever it is, a head meets the same code with the same tensors, so the same keys are
selected.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError, StageError
from shadowattn.exclusive import current_work, working_for
from shadowattn.graphs.buckets import heads_at_once
from shadowattn.kernels import native
from shadowattn.online.channel import Channel, ClosedError
from shadowattn.online.plan import Group
from shadowattn.online.stages import Stages
from shadowattn.online.timeline import Span, Timeline
from shadowattn.online.workers import Workers
from shadowattn.threads import thread_budget
from shadowattn.types import Selection


@dataclass(frozen=True)
class Threads:
    """Cores that each stage may use; None: as many as torch has in the calling thread."""

    estimate: int | None = None
    select: int | None = None
    attend: int | None = None

    def __post_init__(self):
        for stage, threads in vars(self).items():
            if threads is not None:
                checks.integer(f"{stage}_threads", threads, least=1)


@dataclass(frozen=True)
class Ran:
    """Output [H, Q, D] of a chunk, its lists (or how many (head, row, key) pairs were kept), and what ran when."""

    out: Tensor
    selected: Selection | int
    timeline: Timeline


class Pool:
    """Memory of scores, or of lists, that go from one stage to the next. It is kept between calls: first touching fresh memory
    costs more than a copy.
    """

    def __init__(self):
        self._free: list[torch.UntypedStorage] = []  # storages, since a tensor also remembers its size and torch's mode

    def __reduce__(self):
        return Pool, ()  # a copy keeps memory of its own

    def take(self, nbytes: int) -> Tensor:
        """Memory uint8 [nbytes]."""
        try:
            kept = self._free.pop()
        except IndexError:
            kept = torch.UntypedStorage(nbytes)
        if kept.nbytes() < nbytes:
            kept = torch.UntypedStorage(nbytes)
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(kept, 0, (nbytes,))

    def copy(self, scores: Tensor) -> Tensor:
        """A copy in memory of its own."""
        return self.take(scores.numel() * scores.itemsize).view(scores.dtype).view(scores.shape).copy_(scores)

    def give_back(self, memory: Tensor) -> None:
        """Takes back what `take` or `copy` returned, or a view of it, however much larger its memory is."""
        self._free.append(memory.untyped_storage())


# What one launch may hold beside scores (`heads_at_once`). Lists that an estimator makes without scores should still be in the
# last-level cache when attention reads them. An estimator that rounds keys anew may hold those of a launch in float32 while it
# does: where no heads share them, they outgrow the scores.
_KEY_BYTES, _LIST_BYTES = 32 << 20, 8 << 20
_WAITING_BYTES = 48 << 20  # of the scores that wait for their selection


def run_batched(stages: Stages, *, threads: Threads, keep_lists: bool) -> Ran:
    """Each stage for as many neighbouring heads at once as fit into memory, in the calling thread; all heads at once where the
    estimator attends too, and no stage has a budget of threads of its own.
    """
    if stages.attends_at_once and len(set(vars(threads).values())) == 1:
        return _run_at_once(stages, threads=threads.attend, keep_lists=keep_lists)
    parts = batches(stages)
    with stages.estimator.use(), _between_kernels(stages, budgeted=any(vars(threads).values())):
        run = _Run(stages, parts, [group.heads for group in parts], threads, keep_lists, pool=None, batched=True)
        run.attend(run.select(run.estimate()))
        return run.result()


def _between_kernels(stages: Stages, *, budgeted: bool = False) -> AbstractContextManager:
    """torch's operators run alone where the native kernels do all the rest, and no stage has threads of its own."""
    by_kernels = stages.estimator.is_native and stages.kernels.name == "native"
    return native.alone() if by_kernels and not budgeted else nullcontext()


def run_ranking(stages: Stages) -> Selection:
    """The lists of all heads, as `run_batched` would attend to them, in the calling thread."""
    parts = batches(stages)
    with stages.estimator.use(), _between_kernels(stages):
        run = _Run(stages, parts, [group.heads for group in parts], Threads(), keep_lists=True, pool=None, batched=True)
        return Selection.cat([selection for _, selection in run.select(run.estimate())])


def run_listed(stages: Stages, selection: Selection, *, threads: Threads) -> Ran:
    """Attention of all heads to lists that are there already."""
    heads = tuple(range(len(stages.chunk.heads)))
    run = _Run(stages, [Group(heads)], [heads], threads, keep_lists=True, pool=None, batched=True)
    run.attend([(_places(heads), selection)])
    return run.result()


def _run_at_once(stages: Stages, *, threads: int | None, keep_lists: bool) -> Ran:
    """One call, recorded as attention."""
    chunk, start = stages.chunk, time.perf_counter()
    with stages.estimator.use(), thread_budget(threads), _between_kernels(stages):
        out, selected = stages.attend_at_once(listed=keep_lists)
    # Lists of single rows are as long together as the pairs that they keep.
    listed = selected if isinstance(selected, int) and stages.rule.query_block == 1 else stages.listed_keys
    moved = 2 * out.nbytes + 2 * listed * out.shape[2] * chunk.k.element_size()
    span = Span("attend", tuple(range(len(chunk.heads))), 0.0, (time.perf_counter() - start) * 1e6, "CPU", moved)
    return Ran(out, selected, Timeline((span,), "measured"))


def batches(stages: Stages) -> list[Group]:
    """Runs of neighbouring heads that go through estimate, select and attend together."""
    heads, rows, dim = stages.chunk.q.shape
    if stages.rule.query_block > 1 and stages.rule.pooling == "rows":
        rows = -(-rows // stages.rule.query_block)
    keys = stages.chunk.keys
    if stages.selects_in_estimate:
        kept = max(float(stages.chunk.retention.max()), min(1.0, stages.rule.min_budget / keys))
        count = max(1, int(_LIST_BYTES / (4 * rows * keys * kept)))
    else:
        groups = max(1, _KEY_BYTES // (4 * keys * dim))
        count = min(heads_at_once(rows, keys), groups * heads // len(stages.chunk.heads.grouped()))
    return [Group(tuple(range(at, min(at + count, heads)))) for at in range(0, heads, count)]


def run_serial(stages: Stages, launches: Sequence[Group], *, threads: Threads, keep_lists: bool, pool: Pool | None = None) -> Ran:
    """Launch by launch and head by head in the calling thread; arguments as in `run_overlapped`.

    Without a pool scores are read where the launch left them: no head outlives its launch.
    """
    order = [(head,) for group in launches for head in group.heads]
    with stages.estimator.use():
        run = _Run(stages, launches, order, threads, keep_lists, pool)
        run.attend(run.select(run.estimate()))
        return run.result()


def run_overlapped(
    stages: Stages,
    launches: Sequence[Group],
    order: Sequence[int],
    *,
    threads: Threads,
    queue_heads: int,
    keep_lists: bool,
    pool: Pool,
    list_pool: Pool | None = None,
) -> Ran:
    """The three stages at the same time, on different heads.

    `launches` go through the estimate in their order; selection and attention take the heads in `order`, at most
    `queue_heads` of which wait between two stages. The estimate and the selection have threads that live as long as the call,
    attention runs in the calling thread. Where a stage fails all stop, and when none is at work the error is raised
    here: `InputError` and interruptions as they are, anything else as `StageError`; all name stage and heads. Interruptions
    wait for what a stage is at: a launch cannot be stopped, and nobody may use its memory meanwhile.

    Scores live from their launch until their head is selected: those of at most `queue_heads` heads in the queue, of one being
    selected, and of all that were launched before their turn in `order`, which only `Pipeline.plan` bounds. Where the order is
    that of the launches these are one launch's; an order that begins with the last launch keeps the scores of every head.
    Fewer wait in a queue whose scores would take more than 48 MiB, with the padding of the memory that they are in, or lists more
    than 8 MiB; none where a head's alone would.
    """
    run = _Run(stages, launches, [(head,) for head in order], threads, keep_lists, pool, list_pool)
    scores = Channel(min(queue_heads, _WAITING_BYTES // max(map(stages.waiting_bytes, launches))))
    selections = Channel(min(queue_heads, _LIST_BYTES // (4 * max(1, stages.most_listed()))))
    channels = (scores, selections)
    failures: list[BaseException] = []
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    torch_threads, caller = torch.get_num_threads(), current_work()

    def close() -> None:
        for channel in channels:
            channel.close()

    def stop(error: BaseException) -> None:
        if not isinstance(error, ClosedError):
            failures.append(error)
        close()

    def work(channel: Channel, source: Callable[[], Iterable]) -> None:
        try:
            # A thread's own in torch. Asking makes it what was set last anywhere, be it a stage's budget; setting comes after.
            torch.get_num_threads()
            torch.set_num_threads(torch_threads)
            with working_for(caller), torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
                channel.feed(source())
        except BaseException as error:
            stop(error)

    if stages.selects_in_estimate:
        beside = [(selections, run.estimate)]
    else:
        beside = [(scores, run.estimate), (selections, lambda: run.select(scores))]
    workers = Workers()
    with stages.estimator.use():  # until no stage is at work
        try:
            for stage in beside:
                workers.start(partial(work, *stage))
            run.attend(selections)
        except BaseException as error:
            stop(error)
        finally:
            failures += workers.wait(close)
            torch.set_num_threads(torch_threads)  # an interruption may have come before attention's budget was undone
    if failures:
        raise next((error for error in failures if not isinstance(error, Exception)), failures[0])
    return run.result()


class _Run:
    """The stages of one call as generators, and the record that they leave.

    `order` holds the places of heads that go through selection and attention together: one by one, or `batched`, all
    neighbours that a launch holds.
    """

    def __init__(
        self,
        stages: Stages,
        launches: Sequence[Group],
        order: Sequence[tuple[int, ...]],
        threads: Threads,
        keep_lists: bool,
        pool: Pool | None,
        list_pool: Pool | None = None,
        *,
        batched: bool = False,
    ):
        heads = list(range(len(stages.chunk.heads)))
        launched, ordered = sorted(h for group in launches for h in group.heads), sorted(h for some in order for h in some)
        if not heads == launched == ordered:
            raise ValueError(f"expected each of {len(heads)} heads in one launch and once in the order, got {launches}, {order}")
        self._stages, self._launches, self._order = stages, launches, order
        self._threads, self._keep_lists, self._batched = threads, keep_lists, batched
        self._pool = pool if stages.reuses_scores else None
        self._list_pool = None if keep_lists or stages.selects_in_estimate else list_pool
        self._out = torch.empty_like(stages.chunk.q, memory_format=torch.contiguous_format)
        self._lists: dict[int, Selection] = {}
        self._kept = 0
        self._spans: list[Span] = []
        self._started = time.perf_counter()
        if not batched:
            stages.prepare()

    def estimate(self) -> Iterator[tuple[slice, Any]]:
        """Some heads at a time, in order, and their scores [h, rows, K] (where the estimator selects: their lists)."""
        stages, chunk, ready = self._stages, self._stages.chunk, {}
        kv_head = chunk.heads.kv.tolist()
        order = iter(self._order)
        following = next(order, None)
        for group in self._launches:
            parts = [group.heads] if self._batched else [(head,) for head in group.heads]
            with self._stage("estimate", group.heads, stages.estimator.device, self._threads.estimate) as span:
                if stages.selects_in_estimate:
                    outputs = [stages.choose(_places(some)) for some in parts]
                    span.bytes = sum(selection.indices.nbytes for selection in outputs)
                else:
                    # Heads that are launched together would give their memory back together.
                    room = stages.room(group) if self._pool is not None else None
                    out = None if room is None else self._pool.take(room)
                    scores = stages.estimate(group) if self._batched else stages.launch(group, out)
                    outputs = scores.split([len(some) for some in parts])
                    if self._pool is not None and out is None:
                        outputs = [self._pool.copy(some) for some in outputs]
                    span.bytes = scores.nbytes
                span.bytes += len(group.heads) * chunk.q[0].nbytes
                span.bytes += len({kv_head[head] for head in group.heads}) * chunk.k[0].nbytes
            ready.update(zip(parts, outputs, strict=True))
            scores = outputs = out = None  # or they would live beside the next launch's
            while following in ready:
                yield _places(following), ready.pop(following)
                following = next(order, None)

    def select(self, source: Iterable[tuple[slice, Any]]) -> Iterator[tuple[slice, Selection]]:
        """The same heads and their lists."""
        if self._stages.selects_in_estimate:
            yield from source
            return
        for heads, scores in source:
            with self._stage("select", range(heads.start, heads.stop), "CPU", self._threads.select) as span:
                memory = None if self._list_pool is None else self._list_pool.take(4 * self._stages.listed(heads))
                selection = self._stages.select(scores, heads, None if memory is None else memory.view(torch.int32))
                span.bytes = scores.nbytes + selection.indices.nbytes
            if self._pool is not None:
                self._pool.give_back(scores)
            del scores
            yield heads, selection
            del selection, memory  # or they would live beside the next ones

    def attend(self, source: Iterable[tuple[slice, Selection]]) -> None:
        """All heads' outputs."""
        for heads, selection in source:
            with self._stage("attend", range(heads.start, heads.stop), "CPU", self._threads.attend) as span:
                self._out[heads] = self._stages.attend(selection, heads)
                listed = len(selection.indices) * self._out.shape[2] * self._stages.chunk.k.element_size()
                span.bytes = 2 * self._out[heads].nbytes + selection.indices.nbytes + 2 * listed
            if self._keep_lists:
                self._lists[heads.start] = selection
            else:
                self._kept += selection.kept()
            if self._list_pool is not None:
                self._list_pool.give_back(selection.indices)
            del selection

    def result(self) -> Ran:
        selected = Selection.cat([self._lists[head] for head in sorted(self._lists)]) if self._keep_lists else self._kept
        return Ran(self._out, selected, Timeline(tuple(sorted(self._spans, key=lambda span: span.start_us)), "measured"))

    @contextmanager
    def _stage(self, stage: str, heads: Sequence[int], device: str, threads: int | None) -> Iterator["_Open"]:
        opened, start = _Open(), time.perf_counter()
        try:
            with thread_budget(threads):
                yield opened
        except BaseException as error:
            if self._batched:  # one thread and one call: the error says where it is from
                raise
            chunk = self._stages.chunk
            where = _where(stage, chunk.heads.ids[list(heads)].tolist(), chunk.layer)
            if isinstance(error, InputError):
                raise InputError(f"{where}: {error}") from error
            if isinstance(error, Exception):
                raise StageError(f"{where} failed: {type(error).__name__}: {error}") from error
            error.add_note(f"in {where}")  # an interruption stays what it is
            raise
        times = ((at - self._started) * 1e6 for at in (start, time.perf_counter()))
        self._spans.append(Span(stage, tuple(heads), *times, device, opened.bytes))


class _Open:
    """A span that is not over yet."""

    bytes: int = 0


def _places(heads: tuple[int, ...]) -> slice:
    return slice(heads[0], heads[-1] + 1)


def _where(stage: str, heads: list[int], layer: int) -> str:
    return f"{stage} of {'head' if len(heads) == 1 else 'heads'} {', '.join(map(str, heads))} in layer {layer}"
