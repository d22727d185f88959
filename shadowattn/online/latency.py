"""What each stage takes on this machine: measured, bound to what it was measured with, interpolated in between (section 3.4).

Schedulers and the simulator see it as a `plan.Work`. `online.latency_profiler` measures it, `+exp=latency_profile` runs that.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from shadowattn.artifacts import write_json
from shadowattn.errors import InputError
from shadowattn.online.plan import Group, Launch, Work
from shadowattn.online.timeline import STAGES

SCHEMA_VERSION = 3
REMEDY = (
    "measure it with shadowattn.online.latency_profiler.LatencyProfiler, or in a checkout with: "
    "python -m experiments.run +exp=latency_profile"
)
# Of a whole call, beside its spans: what the heads share before the first span, and what passes between two spans.
CALL_STAGES = ("prepare", "task_overhead")
# Calls that something else on the machine held up: this share of them, the slowest, is left out.
SLOWEST = 0.1

T = TypeVar("T")


def without_slowest(calls: Sequence[T], took: Callable[[T], float]) -> list[T]:
    """The calls without their slowest tenth by `took`.

    Whole calls are left out, not single spans, so that means still add up: the mean spans of the calls that stay are together
    the mean of these calls. Medians would not: spans are skewed, and a sum of their medians falls short of the whole.
    """
    return sorted(calls, key=took)[: len(calls) - int(SLOWEST * len(calls))]


@dataclass(frozen=True, order=True)
class Latency:
    """One stage at one point, over `n` spans of whole calls that had the machine to themselves.

    An estimate is of a launch of `heads` heads in `bucket` (−1: no buckets) on a graph for up to `capacity` keys (0: no static
    shape), whatever the retention. Selection and attention are of one head; `CALL_STAGES` of a call, or of a pause in it.
    Means are what predicts a call, see `without_slowest`; median and p95 show how skewed the spans are.
    """

    stage: str
    heads: int
    bucket: int
    capacity: int
    retention: float  # 1 for an estimate
    keys: int
    mean_us: float
    median_us: float
    p95_us: float
    n: int

    def __post_init__(self):
        for field in fields(self):
            value, expected = getattr(self, field.name), (int, float) if field.type is float else field.type
            if not isinstance(value, expected) or (field.type is not str and not -1 <= value < math.inf):
                raise InputError(f"latency: expected {field.name} as a finite {field.type.__name__}, got {value!r}")
        stages = (*STAGES, *CALL_STAGES)
        if self.stage not in stages or min(self.mean_us, self.median_us, self.p95_us) < 0:
            raise InputError(f"latency: expected a time of at least 0 µs of {', '.join(stages)}, got {self}")


@dataclass(frozen=True)
class InterpolationError:
    """How far points are from what their neighbours over `axis` (keys, retention) say: each left out in turn, relative."""

    stage: str
    axis: str
    median: float
    worst: float
    n: int


@dataclass(frozen=True)
class LatencyProfile:
    """All points of one measurement, and in `binding` everything that they hold for (`LatencyProfiler.binding`)."""

    binding: dict[str, str | int]
    points: tuple[Latency, ...]

    def work(self, groups: Sequence[Group], retention: Sequence[float], *, keys: int) -> Work:
        """The cost of one layer's chunk: a launch for each group, selection and attention of heads with `retention` [H].

        Means, linear in keys and in retention between measured points; the shortest measured keys also stand for fewer.
        A chunk with fewer rows than the profile's costs no more than this. Raises `InputError` beyond what was measured.
        """
        launches = tuple(Launch(group.heads, self.estimate_us(len(group.heads), group.bucket, keys)) for group in groups)
        return Work(launches, *(tuple(self.stage_us(stage, retention, keys).tolist()) for stage in ("select", "attend")))

    def estimate_us(self, heads: int, bucket: int, keys: int) -> float:
        """Of a launch of `heads` heads in `bucket`; a number of heads that has no launch of its own goes into the next larger."""
        sizes = [size for size, launch_bucket in self._launches if launch_bucket == bucket and size >= heads]
        steps = self._launches[min(sizes), bucket] if sizes else {}
        capacities = [capacity for capacity in steps if capacity >= keys or not capacity]
        if not capacities:
            raise self._beyond(f"a launch of {heads} heads in bucket {bucket} on {keys} keys")
        at, mean = steps[min(capacities)]
        if keys > at[-1]:
            raise self._beyond(f"{keys} keys")
        return float(np.interp(keys, at, mean))

    def stage_us(self, stage: str, retention: Sequence[float], keys: int) -> np.ndarray:
        """Selection (`select`) or attention (`attend`) of heads with `retention` [H]."""
        curves = self._stages[stage]
        retentions = np.array(list(curves))
        within = len(curves) and retentions[0] <= min(retention) and max(retention) <= retentions[-1]
        if not within or keys > min(at[-1] for at, _ in curves.values()):
            raise self._beyond(f"{stage} of retention {min(retention):g} … {max(retention):g} on {keys} keys")
        values = [np.interp(keys, at, mean) for at, mean in curves.values()]
        return np.interp(retention, retentions, values)

    def call_us(self, stage: str, keys: int) -> float:
        """What a layer's call takes beside its spans: `prepare` once, `between` for every span."""
        curve = sorted((point.keys, point.mean_us) for point in self.points if point.stage == stage)
        if not curve or keys > curve[-1][0]:
            raise self._beyond(f"{stage} of a call on {keys} keys")
        return float(np.interp(keys, *zip(*curve, strict=True)))

    def errors(self) -> list[InterpolationError]:
        """What interpolation costs in accuracy, for each stage and axis that has points between others."""
        along = {
            "keys": lambda p: (p.stage, p.heads, p.bucket, p.capacity, p.retention),
            "retention": lambda p: (p.stage, p.heads, p.bucket, p.capacity, p.keys),
        }
        summaries = []
        for stage in ("estimate", "select", "attend"):
            for axis, curve_of in along.items():
                curves = defaultdict(list)
                for point in self.points:
                    if point.stage == stage:
                        curves[curve_of(point)].append((getattr(point, axis), point.mean_us))
                errors = [error for curve in curves.values() for error in _left_out(sorted(curve))]
                if errors:
                    summaries.append(InterpolationError(stage, axis, float(np.median(errors)), max(errors), len(errors)))
        return summaries

    def check(self, binding: dict[str, str | int]) -> None:
        """Raises `InputError` where a run with `binding` is not one that this was measured for.

        Fewer rows or heads than it was measured with are one: a last chunk is shorter, and some of a layer's heads may go dense.
        """
        for name, here in binding.items():
            measured = self.binding.get(name)
            fewer = name in ("rows", "heads") and isinstance(measured, int) and here < measured
            if measured != here and not fewer:
                raise InputError(f"latency profile: measured with {name} {measured}, here it is {here}; {REMEDY}")

    def save(self, path: Path) -> Path:
        """Writes it as JSON with a checksum, atomically."""
        content = {"binding": self.binding, "points": [asdict(point) for point in self.points]}
        write_json(path, {"schema_version": SCHEMA_VERSION, "sha256": _digest(content), "profile": content})
        return path

    @classmethod
    def load(cls, path: Path) -> "LatencyProfile":
        """Reads one. Raises `InputError` where it is missing, cut short, altered, of another version or another content."""
        try:
            stored = json.loads(Path(path).read_text())
            version, digest, content = stored["schema_version"], stored["sha256"], stored["profile"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"latency profile {path}: cannot be read ({error}); {REMEDY}") from error
        if version != SCHEMA_VERSION:
            raise InputError(f"latency profile {path}: expected schema version {SCHEMA_VERSION}, got {version}; {REMEDY}")
        if digest != _digest(content):
            raise InputError(f"latency profile {path}: altered since it was written; {REMEDY}")
        try:
            return cls(dict(content["binding"]), tuple(Latency(**point) for point in content["points"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"latency profile {path}: not the content of one ({error}); {REMEDY}") from error

    @cached_property
    def _launches(self) -> dict[tuple[int, int], dict[int, tuple[list, list]]]:
        """Keys and means of every (heads, bucket) and capacity."""
        launches = defaultdict(lambda: defaultdict(lambda: ([], [])))
        for point in sorted(self.points):
            if point.stage == "estimate":
                _append(launches[point.heads, point.bucket][point.capacity], point)
        return launches

    @cached_property
    def _stages(self) -> dict[str, dict[float, tuple[list, list]]]:
        """Keys and means of selection and attention at every retention, ascending."""
        stages = {"select": defaultdict(lambda: ([], [])), "attend": defaultdict(lambda: ([], []))}
        for point in sorted(self.points):
            if point.stage in stages:
                _append(stages[point.stage][point.retention], point)
        return stages

    def _beyond(self, request: str) -> InputError:
        longest = max((point.keys for point in self.points), default=0)
        retentions = sorted({point.retention for point in self.points if point.stage == "attend"})
        return InputError(
            f"latency profile: measured up to {longest} keys at retentions {retentions}, asked for {request}; {REMEDY} for it"
        )


def _append(curve: tuple[list, list], point: Latency) -> None:
    curve[0].append(point.keys)
    curve[1].append(point.mean_us)


def _left_out(curve: list[tuple[float, float]]) -> Iterator[float]:
    """Relative error of each inner point of (x, y) pairs against the line through its neighbours."""
    for before, (x, y), after in zip(curve, curve[1:], curve[2:], strict=False):
        yield abs(float(np.interp(x, (before[0], after[0]), (before[1], after[1]))) / y - 1)


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
