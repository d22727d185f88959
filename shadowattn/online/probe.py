"""Measures a latency profile: the executor's own stages, run alone on random tensors of a model's shape."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from shadowattn.artifacts import content_hash, sha256, versions
from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.estimation import GraphForm
from shadowattn.graphs.quantize import INT8_MAX
from shadowattn.kernels import Kernels, native
from shadowattn.machine import cores, processor
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Chooser, Estimator
from shadowattn.online.executor import ScorePool, Threads, run_sequential
from shadowattn.online.latency import Latency
from shadowattn.online.plan import Group
from shadowattn.online.selection import Rule
from shadowattn.types import Heads


@dataclass(frozen=True)
class Probe:
    """What is measured: chunks of `rows` rows of a layer with such heads, by these parts."""

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

    def __post_init__(self):
        if isinstance(self.estimator, Chooser):
            raise InputError(
                f"latency profile: {type(self.estimator).__name__} selects while it estimates, so there is nothing to plan; "
                "use estimator=int8"
            )

    @property
    def bank(self) -> GraphBank | None:
        return getattr(self.estimator, "bank", None)

    def binding(self) -> dict[str, str | int]:
        """What a profile of these measurements holds for."""
        parts = self.estimator, self.kernels, self.rule, self.threads
        shape = {"heads": self.heads, "kv_heads": self.kv_heads, "rows": self.rows, "head_dim": self.head_dim}
        return binding(*parts, **shape, dtype=self.dtype)

    def launches(self) -> list[Group]:
        """Every kind of launch: each size in each bucket; without a bank one head, and all that read the same keys.

        Buckets of one K scale come one after another, so that their keys are in the cache, as a layer's are.
        """
        if self.bank is None:
            sizes, buckets = {1, self.heads // self.kv_heads}, [-1]
        else:
            sizes = {min(size, self.heads) for size in self.bank.launch_heads}
            slots = {self.bank.slot(pair) for pair in range(len(self.bank.pairs))}
            buckets = sorted(slots, key=lambda slot: self.bank.pairs[slot][::-1])
        return [Group(tuple(range(size)), bucket) for bucket in buckets for size in sorted(sizes)]

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

    def measure(self, keys: int, retentions: Sequence[float], *, repeats: int) -> list[Latency]:
        """Every launch, and selection and attention at every retention, on `keys` keys. Launches and retentions take turns."""
        launches = self.launches()
        tensors = self._tensors({group.bucket for group in launches}, keys)
        pool, taken = ScorePool(), defaultdict(list)
        for repeat in range(-1, max(repeats, len(retentions))):  # the first round warms up
            for turn, group in enumerate(launches):
                retention = retentions[(turn + repeat) % len(retentions)]
                chunk = self._chunk(*tensors[group.bucket], group, retention)
                for _ in range(2):  # the second counts: in a layer, too, heads that read the same keys follow one another
                    ran = run_sequential(chunk, [group], threads=self.threads, keep_lists=False, pool=pool)
                for span in ran.timeline.spans if repeat >= 0 else ():
                    point = (len(group.heads), group.bucket, self._capacity(group, keys), 1.0)
                    point = point if span.stage == "estimate" else (1, -1, 0, retention)
                    taken[span.stage, *point].append(span.end_us - span.start_us)
        return [
            Latency(*point, keys, float(np.median(times)), float(np.percentile(times, 95)), len(times))
            for point, times in taken.items()
        ]

    def _tensors(self, buckets: set[int], keys: int) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """q, k and v for each bucket, normally distributed; largest values that fit it exactly. What can be shared is."""
        generator = torch.Generator().manual_seed(self.seed)
        q = torch.randn(self.heads, self.rows, self.head_dim, generator=generator)
        k, v = torch.randn(2, self.kv_heads, keys, self.head_dim, generator=generator).to(self.dtype)

        @cache
        def scaled(name: str, scale: float) -> Tensor:
            x = q if name == "q" else k
            return (x * (scale * INT8_MAX / x.abs().amax((1, 2), keepdim=True))).to(self.dtype)

        if self.bank is None:
            return dict.fromkeys(buckets, (q.to(self.dtype), k, v))
        pairs = {bucket: self.bank.pairs[bucket] for bucket in buckets}
        return {bucket: (scaled("q", q_scale), scaled("k", k_scale), v) for bucket, (q_scale, k_scale) in pairs.items()}

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, group: Group, retention: float) -> Chunk:
        count = len(group.heads)
        return Chunk(
            q[:count], k, v, torch.full((count,), retention, dtype=torch.float64), 0,
            k.shape[1] - self.rows + torch.arange(self.rows), Heads.all(self.heads, self.kv_heads)[:count],
            self.estimator, self.rule, self.kernels, self.head_dim**-0.5,
        )  # fmt: skip

    def _capacity(self, group: Group, keys: int) -> int:
        if self.bank is None:
            return 0
        shape = {"heads": len(group.heads), "rows": self.rows, "keys": keys, "head_dim": self.head_dim}
        return self.bank.shape_for(**shape).keys


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
    bank = getattr(estimator, "bank", None)
    return {
        **_machine(),
        "kernels": _native(native.level()) if kernels.name == "native" else kernels.name,
        "estimator": type(estimator).__name__,
        "bank": "none" if bank is None else _bank(bank.pairs, bank.shapes, bank.form, bank.device, bank.distance),
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
def _native(level: int) -> str:
    """A build of the native kernels is known by its bytes."""
    return f"native {native.LEVELS[level]} {sha256(native.path())[:12]}"


@cache
def _bank(
    pairs: tuple[tuple[float, float], ...], shapes: tuple[GraphShape, ...], form: GraphForm, device: str, distance: str
) -> str:
    """What the bank's manifest lists."""
    listed = {"pairs": pairs, "shapes": [asdict(shape) for shape in shapes], "form": asdict(form)}
    return content_hash(listed | {"device": device, "lookup": distance})
