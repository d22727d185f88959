"""Runs a chunk's heads through estimate, select and attend: one after another, or each stage in a thread of its own.

The stages are generators that feed on one another. Chained they run head by head; with a channel between two of them they
overlap. Whichever it is, a head meets the same code with the same tensors, so the same keys are selected.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError, StageError
from shadowattn.exclusive import current_work, working_for
from shadowattn.online.channel import Channel, ClosedError
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import using
from shadowattn.online.plan import Group
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


class ScorePool:
    """Memory for scores that outlive their launch, kept between calls: first touching fresh memory costs more than the copy."""

    def __init__(self):
        self._free: list[torch.UntypedStorage] = []  # storages, since a tensor also remembers its size and torch's mode

    def copy(self, scores: Tensor) -> Tensor:
        """A copy in memory of its own."""
        try:
            kept = self._free.pop()
        except IndexError:
            kept = torch.UntypedStorage(scores.nbytes)
        if kept.nbytes() < scores.nbytes:
            kept = torch.UntypedStorage(scores.nbytes)
        return scores.new_empty(0).set_(kept, 0, scores.shape).copy_(scores)

    def give_back(self, scores: Tensor) -> None:
        """Takes back what `copy` returned, however much larger its memory is."""
        self._free.append(scores.untyped_storage())


def run_sequential(
    chunk: Chunk, launches: Sequence[Group], *, threads: Threads, keep_lists: bool, pool: ScorePool | None = None
) -> Ran:
    """Launch by launch and head by head in the calling thread; arguments as in `run_overlapped`.

    Without a pool scores are read where the launch left them: no head outlives its launch.
    """
    order = [head for group in launches for head in group.heads]
    with using(chunk.estimator):
        run = _Run(chunk, launches, order, threads, keep_lists, pool)
        run.attend(run.select(run.estimate()))
        return run.result()


def run_overlapped(
    chunk: Chunk,
    launches: Sequence[Group],
    order: Sequence[int],
    *,
    threads: Threads,
    queue_heads: int,
    keep_lists: bool,
    pool: ScorePool,
) -> Ran:
    """The three stages at the same time, on different heads.

    `launches` go through the estimate in their order; selection and attention take the heads in `order`, at most
    `queue_heads` of which wait between two stages. The estimate and the selection have threads that live as long as the call,
    attention runs in the calling thread. Where a stage fails all stop, and when none is at work the error is raised
    here: `InputError` and interruptions as they are, anything else as `StageError`; all name stage and heads. Interruptions
    wait for what a stage is at: a launch cannot be stopped, and nobody may use its memory meanwhile.

    Scores live from their launch until their head is selected: those of at most `queue_heads` heads in the queue, of one being
    selected, and of all that were launched before their turn in `order`, which nothing else bounds. Where the order is
    that of the launches these are one launch's; an order that begins with the last launch keeps the scores of every head.
    """
    run = _Run(chunk, launches, order, threads, keep_lists, pool)
    scores, selections = Channel(queue_heads), Channel(queue_heads)
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

    if chunk.selects_in_estimate:
        stages = [(selections, run.estimate)]
    else:
        stages = [(scores, run.estimate), (selections, lambda: run.select(scores))]
    workers = Workers()
    with using(chunk.estimator):  # until no stage is at work
        try:
            for stage in stages:
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
    """The stages of one call as generators, and the record that they leave."""

    def __init__(self, chunk: Chunk, launches: Sequence[Group], order: Sequence[int], threads, keep_lists, pool):
        heads = list(range(len(chunk.heads)))
        if not heads == sorted(order) == sorted(head for group in launches for head in group.heads):
            raise ValueError(f"expected each of {len(heads)} heads in one launch and once in the order, got {launches}, {order}")
        self._chunk, self._launches, self._order = chunk, launches, order
        self._threads: Threads = threads
        self._keep_lists: bool = keep_lists
        self._pool: ScorePool | None = pool if chunk.reuses_scores else None
        self._out = torch.empty(chunk.q.shape, dtype=chunk.q.dtype)
        self._lists: dict[int, Selection] = {}
        self._kept = 0
        self._spans: list[Span] = []
        self._started = time.perf_counter()
        chunk.prepare()

    def estimate(self) -> Iterator[tuple[int, Any]]:
        """Each head, in order, and its scores [1, rows, K] (where the estimator selects: its lists)."""
        chunk, ready, kv_head = self._chunk, {}, self._chunk.heads.kv.tolist()
        order = iter(self._order)
        following = next(order, None)
        for group in self._launches:
            with self._stage("estimate", group.heads, chunk.device, self._threads.estimate) as span:
                if chunk.selects_in_estimate:
                    made = [chunk.choose(head) for head in group.heads]
                    span.bytes = sum(selection.indices.nbytes for selection in made)
                else:
                    scores = chunk.estimate(group)
                    made = scores.split(1)
                    if self._pool is not None:
                        made = [self._pool.copy(one) for one in made]
                    span.bytes = scores.nbytes
                span.bytes += len(group.heads) * chunk.q[0].nbytes
                span.bytes += len({kv_head[head] for head in group.heads}) * chunk.k[0].nbytes
            ready.update(zip(group.heads, made, strict=True))
            while following in ready:
                yield following, ready.pop(following)
                following = next(order, None)

    def select(self, source: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Selection]]:
        """Each head and its lists."""
        if self._chunk.selects_in_estimate:
            yield from source
            return
        for head, scores in source:
            with self._stage("select", (head,), "CPU", self._threads.select) as span:
                selection = self._chunk.select(scores, head)
                span.bytes = scores.nbytes + selection.indices.nbytes
            if self._pool is not None:
                self._pool.give_back(scores)
            yield head, selection

    def attend(self, source: Iterable[tuple[int, Selection]]) -> None:
        """All heads' outputs."""
        for head, selection in source:
            with self._stage("attend", (head,), "CPU", self._threads.attend) as span:
                self._out[head] = self._chunk.attend(selection, head)[0]
                listed = len(selection.indices) * self._out.shape[2] * self._chunk.k.element_size()
                span.bytes = 2 * self._out[head].nbytes + selection.indices.nbytes + 2 * listed
            if self._keep_lists:
                self._lists[head] = selection
            else:
                self._kept += selection.kept()

    def result(self) -> Ran:
        selected = Selection.cat([self._lists[head] for head in sorted(self._lists)]) if self._keep_lists else self._kept
        return Ran(self._out, selected, Timeline(tuple(sorted(self._spans, key=lambda span: span.start_us)), "measured"))

    @contextmanager
    def _stage(self, stage: str, heads: tuple[int, ...], device: str, threads: int | None) -> Iterator["_Open"]:
        opened, start = _Open(), time.perf_counter()
        try:
            with thread_budget(threads):
                yield opened
        except BaseException as error:
            where = _where(stage, [int(self._chunk.heads.ids[head]) for head in heads], self._chunk.layer)
            if isinstance(error, InputError):
                raise InputError(f"{where}: {error}") from error
            if isinstance(error, Exception):
                raise StageError(f"{where} failed: {type(error).__name__}: {error}") from error
            error.add_note(f"in {where}")  # an interruption stays what it is
            raise
        times = ((at - self._started) * 1e6 for at in (start, time.perf_counter()))
        self._spans.append(Span(stage, heads, *times, device, opened.bytes))


class _Open:
    """A span that is not over yet."""

    bytes: int = 0


def _where(stage: str, heads: list[int], layer: int) -> str:
    return f"{stage} of {'head' if len(heads) == 1 else 'heads'} {', '.join(map(str, heads))} in layer {layer}"
