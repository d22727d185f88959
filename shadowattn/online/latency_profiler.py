"""Measures a latency profile: the executor's own stages, in place in whole calls on random tensors of a model's shape."""

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from shadowattn.artifacts import content_hash, sha256, versions
from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.estimation import GraphForm
from shadowattn.graphs.symmetric_int8 import INT8_MAX
from shadowattn.kernels import Kernels, native
from shadowattn.machine import cores, processor
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator
from shadowattn.online.executor import Pool, Threads, run_serial
from shadowattn.online.latency import Latency, without_slowest
from shadowattn.online.plan import Group
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.online.timeline import Timeline

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """One layer's chunk to measure: the scale pair (an index) and the retention of each head [H], and the launches in order."""

    pairs: tuple[int, ...]
    retention: tuple[float, ...]
    launches: tuple[Group, ...]


@dataclass(frozen=True)
class LatencyProfiler:
    """What is measured: chunks of `rows` rows of a layer with such heads, by these parts.

    `pool` is where scores go, as in pipelines that overlap; None: read where the launch left them, as `serial` does.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    dtype: torch.dtype
    estimator: Estimator
    rule: Rule
    kernels: Kernels
    threads: Threads
    seed: int = 0
    pool: Pool | None = field(default_factory=Pool, repr=False, compare=False)

    def __post_init__(self):
        if self.estimator.selects:
            raise InputError(
                f"latency profile: {type(self.estimator).__name__} selects while it estimates, so there is nothing to plan; "
                "use estimator=int8_graph"
            )

    @property
    def parts(self) -> Parts:
        return Parts(self.estimator, self.rule, self.kernels)

    @property
    def bank(self) -> GraphBank | None:
        return self.estimator.graphs

    def binding(self) -> dict[str, str | int]:
        """What a profile of these measurements holds for."""
        parts = self.estimator, self.kernels, self.rule, self.threads
        shape = {"heads": self.heads, "kv_heads": self.kv_heads, "rows": self.rows, "head_dim": self.head_dim}
        return binding(*parts, **shape, dtype=self.dtype)

    def sizes(self, keys: int) -> list[int]:
        """Heads that may share a launch on so many keys; without a bank one head, and all that read the same keys, even on more
        keys than `Estimator.launches` has them share one, since a chunk of fewer rows may.
        """
        if self.bank is None:
            return sorted({1, self.heads // self.kv_heads})
        return sorted({min(size, self.heads) for size in self.bank.launch_heads_for(self.rows, keys, self.head_dim)})

    def key_lengths(self, longest: int) -> list[int]:
        """Both ends and two inner points of every step of the bank's capacities (or of doubling), from `rows` on."""
        steps, longest = [self.rows], max(longest, self.rows)
        if self.bank is not None:
            steps = sorted({shape.keys for shape in self.bank.shapes if shape.keys <= longest})
        while steps[-1] < longest:
            steps.append(min(2 * steps[-1], longest))
        lengths = set()
        for low, high in zip([0, *steps], steps, strict=False):
            lengths |= {int(x) // self.rows * self.rows for x in np.linspace(low + self.rows, high, 4)} | {high}
        return sorted(lengths)

    def layouts(self, retentions: Sequence[float], sizes: Sequence[int]) -> list[Layout]:
        """Layers that together hold a launch of every size in every bucket, and at each size a head of every retention.

        Buckets and retentions are drawn, as a layer mixes them, so that a launch mostly follows one of another bucket: another
        compiled graph, which costs more than the same one again. Heads of one key head share its K scale. The launches are
        in the product's order: head by head, and of several heads by their first.
        """
        draw = random.Random(self.seed)
        kept, layouts = _deck(draw, retentions), []
        for size in sizes:
            pairs_of = self._pairs_by_k_scale()
            k_scales = _deck(draw, list(pairs_of))
            decks = {k_scale: _deck(draw, pairs) for k_scale, pairs in pairs_of.items()}
            slots, unkept = {self._slot(pair) for pairs in pairs_of.values() for pair in pairs}, set(retentions)
            while slots or unkept:
                blocks = [
                    (block, next(decks[k]) if len(block) == size else draw.choice(pairs_of[k]))
                    for run, k in zip(self._runs(size), k_scales, strict=False)
                    for block in _blocks(run, size)
                ]
                groups = tuple(Group(block, self._slot(pair)) for block, pair in blocks)
                retention = tuple(next(kept) for _ in range(self.heads))
                layouts.append(Layout(tuple(pair for block, pair in blocks for _ in block), retention, groups))
                slots -= {group.bucket for group in groups if len(group.heads) == size}
                unkept -= set(retention)
        return layouts

    def measure(
        self, keys: int, retentions: Sequence[float], *, repeats: int, sizes: Sequence[int] | None = None
    ) -> list[Latency]:
        """Every launch of `sizes` (None: all), and selection and attention at every retention, on `keys` keys.

        Spans are taken in place: a call is a whole layer's chunk, launch by launch and head by head, and the chunks take turns.
        """
        layouts = self.layouts(retentions, self.sizes(keys) if sizes is None else sizes)
        v = self._values(keys)
        chunks = [self.chunk(one.pairs, one.retention, keys, seed=number, v=v) for number, one in enumerate(layouts)]
        calls: list[list[tuple[float, Timeline]]] = [[] for _ in layouts]
        for repeat in range(-1, repeats):  # the first round warms up
            for layout, chunk, layout_calls in zip(layouts, chunks, calls, strict=True):
                start = time.perf_counter()
                stages = Stages(chunk.rewound(), self.parts)
                ran = run_serial(stages, layout.launches, threads=self.threads, keep_lists=False, pool=self.pool)
                if repeat >= 0:
                    layout_calls.append(((time.perf_counter() - start) * 1e6, ran.timeline))
        taken = defaultdict(list)
        for layout, layout_calls in zip(layouts, calls, strict=True):
            for took_us, timeline in without_slowest(layout_calls, lambda call: call[0]):
                for point, us in self._spans(layout, timeline, took_us, keys):
                    taken[point].append(us)
        return [
            Latency(*point, keys, float(np.mean(times)), float(np.median(times)), float(np.percentile(times, 95)), len(times))
            for point, times in taken.items()
        ]

    def chunk(self, pairs: Sequence[int], retention: Sequence[float], keys: int, *, seed: int, v: Tensor | None = None) -> Chunk:
        """A layer's chunk at the end of `keys` keys, heads in the buckets of `pairs` [H] (indices; none without a bank).

        Tensors are normally distributed; each head's largest value fits its scale exactly, of K after the bank's key offset is
        subtracted. `v` [G, K, D] may be shared.
        """
        generator = torch.Generator().manual_seed(self.seed * 1000 + seed)
        q = torch.randn(self.heads, self.rows, self.head_dim, dtype=torch.float32, generator=generator)
        k = torch.randn(self.kv_heads, keys, self.head_dim, dtype=torch.float32, generator=generator)
        if self.bank is not None:
            scales = torch.tensor([self.bank.pairs[pair] for pair in pairs], dtype=torch.float32)
            group = self.heads // self.kv_heads
            q = _scaled(q, scales[:, 0])
            k = _scaled(k, scales[::group, 1])
            if self.bank.key_offset is not None:
                k = k + self.bank.key_offset.of(0)[:, None]  # of the chunk's layer
        v = self._values(keys) if v is None else v
        return Chunk.of(q.to(self.dtype), k.to(self.dtype), v, retention=torch.tensor(retention, dtype=torch.float64))

    def mixed(self, draw: random.Random) -> list[int]:
        """A pair for each head as a layer may have them: Q's scale of each head and K's of each key head drawn on their own."""
        pairs_of = self._pairs_by_k_scale()
        group = self.heads // self.kv_heads
        return [draw.choice(pairs) for pairs in draw.choices(list(pairs_of.values()), k=self.kv_heads) for _ in range(group)]

    def _spans(
        self, layout: Layout, timeline: Timeline, took_us: float, keys: int
    ) -> Iterator[tuple[tuple[str, int, int, int, float], float]]:
        """Points and times of one call; its launches that run partly empty are left out."""
        slots = {group.heads: group for group in layout.launches}
        busy = first = 0.0
        for number, span in enumerate(timeline.spans):
            us = span.end_us - span.start_us
            busy, first = busy + us, first if number else span.start_us
            if span.stage != "estimate":
                yield (span.stage, 1, -1, 0, layout.retention[span.heads[0]]), us
            elif len(span.heads) in self.sizes(keys):
                group = slots[span.heads]
                yield (span.stage, len(group.heads), group.bucket, self._capacity(group, keys), 1.0), us
        yield ("prepare", 1, -1, 0, 1.0), first
        yield ("task_overhead", 1, -1, 0, 1.0), max(0.0, took_us - first - busy) / len(timeline.spans)

    def _values(self, keys: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.kv_heads, keys, self.head_dim, generator=generator).to(self.dtype)

    def _pairs_by_k_scale(self) -> dict[float, list[int]]:
        """Indices of the bank's pairs; without a bank one that stands for all."""
        pairs = defaultdict(list)
        for pair, (_, k_scale) in enumerate(self.bank.pairs if self.bank is not None else [(1.0, 1.0)]):
            pairs[k_scale].append(pair)
        return pairs

    def _slot(self, pair: int) -> int:
        return -1 if self.bank is None else self.bank.slot(pair)

    def _runs(self, size: int) -> list[range]:
        """Heads of neighbouring key heads, as many as a launch of `size` heads reads: they share a K scale."""
        group = self.heads // self.kv_heads
        step = -(-size // group) * group
        return [range(at, min(at + step, self.heads)) for at in range(0, self.heads, step)]

    def _capacity(self, group: Group, keys: int) -> int:
        if self.bank is None:
            return 0
        shape = {"heads": len(group.heads), "rows": self.rows, "keys": keys, "head_dim": self.head_dim}
        return self.bank.shape_for(**shape).keys


def _deck(draw: random.Random, items: Sequence[T]) -> Iterator[T]:
    """The items in a drawn order, again and again: drawn evenly, and each soon."""
    while True:
        yield from draw.sample(items, len(items))


def _blocks(run: range, size: int) -> Iterator[tuple[int, ...]]:
    """The run's heads, `size` at a time, what is left one by one."""
    whole = len(run) // size * size
    yield from (tuple(run[at : at + size]) for at in range(0, whole, size))
    yield from ((head,) for head in run[whole:])


def _scaled(x: Tensor, scales: Tensor) -> Tensor:
    """x [H, rows, D] with each head's largest value at the end of the INT8 range of its scale [H]."""
    return x * (scales[:, None, None] * INT8_MAX / x.abs().amax((1, 2), keepdim=True))


def binding(
    estimator: Estimator,
    kernels: Kernels,
    rule: Rule,
    threads: Threads,
    *,
    heads: int,
    kv_heads: int,
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
) -> dict[str, str | int]:
    """What a latency depends on beside its own point: machine, kernels, bank, shape, how lists are made, threads.

    Takes tens of microseconds, so that it can be asked for with every call.
    """
    bank = estimator.graphs
    return {
        **_machine(),
        "kernels": _native(native.level()) if kernels.name == "native" else kernels.name,
        "estimator": type(estimator).__name__,
        "bank": "none" if bank is None else _bank_name(bank),
        "heads": heads,
        "kv_heads": kv_heads,
        "rows": rows,
        "head_dim": head_dim,
        "dtype": str(dtype).removeprefix("torch."),
        **vars(rule),
        **{f"{stage}_threads": budget or torch.get_num_threads() for stage, budget in vars(threads).items()},
    }


@cache
def _machine() -> dict[str, str | int]:
    installed = versions()
    return {"processor": processor(), "cores": cores(), "torch": installed["torch"], "openvino": installed["openvino"]}


@cache
def _native(level: str) -> str:
    """A build of the native kernels is known by its bytes."""
    return f"native {level} {sha256(native.path())[:12]}"


def _bank_name(bank: GraphBank) -> str:
    return _bank(bank.pairs, bank.shapes, bank.form, bank.device, bank.distance, bank.key_offset is not None)


@cache
def _bank(
    pairs: tuple[tuple[float, float], ...],
    shapes: tuple[GraphShape, ...],
    form: GraphForm,
    device: str,
    distance: str,
    subtracts: bool,
) -> str:
    """What the bank's manifest lists, and whether a launch subtracts an offset from K, which takes time."""
    listed = {"pairs": pairs, "shapes": [asdict(shape) for shape in shapes], "form": asdict(form)}
    listed |= {"key_offset": True} if subtracts else {}
    return content_hash(listed | {"device": device, "lookup": distance})
