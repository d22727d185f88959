"""Sparse attention against the best dense attention there is, side by side: one chunk, or one decode step, on random tensors.

A total is the whole path with one estimator, named in its row: `int8_graph`, OpenVINO's, or `int8_fused`, the native kernels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.lab import Lab
from experiments.levels import at_level, check_level
from experiments.machine_peaks import PEAKS, peak_calls, peak_flag
from experiments.own_process import check_memory, in_own_process
from experiments.progress import bar, say
from experiments.random_layers import SHAPES, Case, Tensors
from experiments.refusals import check_choice, check_count
from experiments.studies import attention_candidates as candidates
from experiments.studies.attention_candidates import BASELINES, FLEX_BLOCK
from experiments.studies.attention_memory import every_path, peak_beyond_output
from experiments.studies.base import Study
from shadowattn.artifacts import versions
from shadowattn.errors import InputError
from shadowattn.interleave import Timing, interleave, ratio
from shadowattn.kernels import native
from shadowattn.machine import processor
from shadowattn.models.load import DTYPES
from shadowattn.online.selection import BLOCK_SCORES
from shadowattn.reporting.attention_targets import targets_table
from shadowattn.reporting.figures.attention_speed import AXES
from shadowattn.reporting.figures.attention_speed import draw as draw_attention_speed
from shadowattn.reporting.figures.attention_stages import OUTSIDE
from shadowattn.reporting.figures.attention_stages import draw as draw_stages
from shadowattn.reporting.figures.roofline import draw as draw_roofline
from shadowattn.reporting.rows import SpreadRow

# Of `select`, which is a difference of two times.
_NO_DIFFERENCE = "the estimate alone took longer than with selection, so that this says nothing"
PARTS = ("chunk", "stages", "reads", "machine", "gather", "keys", "retention", "decode", "flex", "memory")


@dataclass(frozen=True)
class AttentionRow(SpreadRow):
    """One way to attend (`method`) on one case of a `part`; `model` names whose layer has such a shape."""

    part: str = ""
    dtype: str = ""
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    processor: str = ""
    threads: int = 0
    versions: str = ""


@dataclass(frozen=True)
class AttentionSpeed(Study):
    """`parts` on layers of `shapes`: the last `rows` rows of `keys` keys at `retention`, where a part varies nothing of that.

    chunk: all there is, with lists of one row and of `query_block` rows by every block score. stages: where the time of whole
    paths goes, by clocks in the kernels, against each of `retentions`. reads: the parts of the flat path, and torch's sums of
    the values on the same lists, which read half of what attention does. machine: the roofs, torch's matrix products, tiles'
    products alone and the sum of a large array. gather: what a user would write without kernels of his own, `gather_rows` rows
    of `gather_keys` keys. keys: against each of `lengths`, at `retention`, or where the last row keeps `kept_keys` keys of
    each. retention: against each of `retentions`. decode: one row, `decode_keys`. flex: torch's flex_attention on the same
    blocks; compiles for minutes. memory: the peak at `memory_keys` keys, of every path, or of those alone in whose names one of
    `memory_paths` stands.

    Candidates take turns in one process for `rounds` rounds; fewer where calls are long, more where they are short, as rows say.
    A decode step finds its keys in no cache, since other memory is read before it, as other layers are; all else finds them
    where the candidate before it left them. Kernels are those of `level` where it names one, as another processor would run
    them, on this one's caches and clock; torch's and OpenVINO's stay the processor's own.
    """

    parts: list[str] = field(
        default_factory=lambda: ["chunk", "stages", "reads", "machine", "gather", "keys", "retention", "decode", "flex", "memory"]
    )
    shapes: list[str] = field(default_factory=lambda: ["smollm2-135m", "qwen2-0.5b", "qwen2-1.5b", "phonelm-1.5b"])
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    rounds: int = 9
    rows: int = 512
    keys: int = 8192
    retention: float = 0.2
    query_block: int = 32
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192, 16384, 32768])
    kept_keys: int | None = None
    retentions: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0])
    gather_rows: int = 256
    gather_keys: int = 2048
    decode_keys: list[int] = field(default_factory=lambda: [4096, 8192, 32768])
    memory_keys: int = 32768
    memory_paths: list[str] = field(default_factory=list)
    level: str | None = None
    needs: ClassVar[tuple[str, ...]] = ("threads",)
    headline: ClassVar[tuple[str, ...]] = (
        "times faster than sdpa",
        "times faster than own dense",
        "peak beyond q, k, v and output",
        "time",
    )

    def __post_init__(self):
        for name, options in (("parts", PARTS), ("shapes", tuple(SHAPES)), ("dtypes", tuple(DTYPES))):
            for value in getattr(self, name):
                check_choice(f"study.{name}", value, options)
        for name in ("parts", "shapes", "dtypes", "lengths", "retentions", "decode_keys"):
            if not getattr(self, name):
                raise InputError(f"study.{name}: expected at least one, got none")
        for name in ("rounds", "rows", "keys", "query_block", "gather_rows", "memory_keys"):
            check_count(f"study.{name}", getattr(self, name))
        check_count("study.gather_keys", self.gather_keys, least=self.gather_rows)
        for name in ("lengths", "decode_keys"):
            check_count(f"study.{name}", min(getattr(self, name)))
        if self.kept_keys is not None:
            if "keys" not in self.parts:
                raise InputError(f"study.kept_keys: only the part keys uses it, got study.parts={self.parts}; add keys")
            if self.parts == ["keys"] and self.retention != type(self).retention:
                raise InputError(
                    f"study.retention: study.kept_keys={self.kept_keys} stands in its place, got both; leave one out"
                )
            check_count("study.kept_keys", self.kept_keys)
            if self.kept_keys > min(self.lengths):
                raise InputError(
                    f"study.kept_keys: expected at most {min(self.lengths)}, the shortest of study.lengths, got {self.kept_keys}"
                    "; keep fewer, or leave short lengths out"
                )
        for name, values in (("retention", [self.retention]), ("retentions", self.retentions)):
            if not all(0 < value <= 1 for value in values):
                raise InputError(f"study.{name}: expected shares of the visible keys, in (0, 1], got {values}")
        for name in ("retentions", "lengths", "decode_keys"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise InputError(f"study.{name}: expected none twice, got {list(getattr(self, name))}")
        self._check_memory_paths()
        if "stages" in self.parts and (self.query_block == 1 or not candidates.times_stages(self.query_block)):
            raise InputError(
                f"study.query_block: the kernels time stages of lists of 4 to 64 rows, got {self.query_block}; leave stages out "
                "of study.parts"
            )
        if self.level is not None and (others := sorted({"machine", "memory"} & set(self.parts))):
            raise InputError(
                f"study.level: {' and '.join(others)} are measured at the processor's own level; leave them out of study.parts"
            )
        if "flex" in self.parts:
            self._check_flex()

    def check(self, lab: Lab) -> None:
        check_level(self.level)
        if "memory" in self.parts:
            check_memory("leave memory out of study.parts")

    def _check_memory_paths(self) -> None:
        if self.memory_paths and "memory" not in self.parts:
            raise InputError(f"study.memory_paths: only the part memory uses it, got study.parts={list(self.parts)}; add memory")
        paths = every_path(self.query_block)
        for words in self.memory_paths:
            if not words or not any(words in path for path in paths):
                raise InputError(f"study.memory_paths: expected words of {'; '.join(paths)}, got {words!r}")

    def _check_flex(self) -> None:
        past = self.keys // FLEX_BLOCK - self.rows // FLEX_BLOCK
        if self.rows % FLEX_BLOCK or self.keys % FLEX_BLOCK or past < self.retention * self.keys / FLEX_BLOCK:
            raise InputError(
                f"study.rows, study.keys: flex takes multiples of {FLEX_BLOCK}, and enough keys before the chunk to keep "
                f"{self.retention:g} of all, got {self.rows} and {self.keys}; change them, or leave flex out of study.parts"
            )

    def measure(self, lab: Lab) -> list[AttentionRow]:
        cases, units = self.cases(), lab.units("cells")
        say(f"attention: {len(cases)} cases of {', '.join(self.parts)}; {self.rounds} rounds, candidates take turns")
        rows = []
        with at_level(self.level):
            row = replace(
                lab.timing_row(AttentionRow),
                kernel=f"native ({native.level()})",
                processor=processor(),
                threads=torch.get_num_threads(),
                versions=f"torch {versions()['torch']}",
            )
            for part, case in bar(cases, "time"):
                key = f"{part} {case.shape} {case.dtype_name} {case.keys} {case.rows} {case.retention:g}"
                rows += rows_of(row, part, case, units.get(key, partial(self._figures, part, case)))
        return rows

    def cases(self) -> list[tuple[str, Case]]:
        """Every case of each part, in turn."""
        pairs = [(shape, dtype) for shape in self.shapes for dtype in self.dtypes]

        def of(lengths: list[int], *, retentions=(self.retention,), rows=self.rows, pairs=pairs) -> list[Case]:
            return [
                Case(shape, DTYPES[dtype], keys, min(rows, keys), kept)
                for shape, dtype in pairs
                for keys in lengths
                for kept in retentions
            ]

        every = {
            "chunk": of([self.keys]),
            "stages": of([self.keys], retentions=self.retentions),
            "reads": of([self.keys]),
            "machine": of([self.keys], pairs=pairs[:1]),
            "gather": of([self.gather_keys], rows=self.gather_rows, pairs=pairs[: len(self.dtypes)]),
            "keys": [case for keys in self.lengths for case in of([keys], retentions=(self._kept_of(keys),))],
            "retention": of([self.keys], retentions=self.retentions),
            "decode": of(self.decode_keys, rows=1),
            "flex": of([self.keys]),
            "memory": of([self.memory_keys]),
        }
        return [(part, case) for part in PARTS if part in self.parts for case in every[part]]

    def _kept_of(self, keys: int) -> float:
        return self.retention if self.kept_keys is None else self.kept_keys / keys

    def _figures(self, part: str, case: Case) -> dict[str, list[float]]:
        """Seconds of each candidate in each round; bytes where the part is `memory`."""
        if part == "memory":
            paths = (path for path in every_path(self.query_block) if self._is_asked(path))
            return {path: [in_own_process(peak_beyond_output, path, case, self.query_block)] for path in paths}
        t = Tensors(case)
        if part == "stages":
            return self._stages(t)
        rounds, warmup = {
            "gather": (3, 1),
            "keys": (max(3, self.rounds * self.keys // max(case.keys, self.keys)), 1),
            "retention": (self.rounds, 1),
            "decode": (4 * self.rounds, 3),
            "machine": (self.rounds, 1),
        }.get(part, (self.rounds, 2))
        calls = self._calls(part, t)
        before = dict.fromkeys(calls, candidates.other_layers()) if part == "decode" else None
        timings = interleave(calls, rounds=rounds, warmup=warmup, before=before)
        return {name: list(timing.seconds) for name, timing in timings.items()}

    def _is_asked(self, path: str) -> bool:
        return not self.memory_paths or any(words in path for words in self.memory_paths)

    def _stages(self, t: Tensors) -> dict[str, list[float]]:
        """Seconds of our dense attention and of whole paths, and of their stages, which runs in turn with the others time."""
        calls = {"own dense": candidates.baselines(t)["own dense"]} | candidates.fused_paths(t, self.query_block)
        clocked = {f"{name}, its stages": candidates.Clocked(call) for name, call in calls.items()}
        timings = interleave(calls | clocked, rounds=self.rounds, warmup=2)
        figures = {name: list(timings[name].seconds) for name in calls}
        for name, one in zip(calls, clocked.values(), strict=True):
            last = one.seconds[-self.rounds :]
            figures |= {f"{name}: {stage}": [seconds[stage] for seconds in last] for stage in last[0]}
        return figures

    def _calls(self, part: str, t: Tensors) -> dict[str, Callable[[], object]]:
        block = self.query_block
        if part == "machine":
            return peak_calls()
        if part == "decode":
            return candidates.decode(t)
        if part == "flex":
            return candidates.baselines(t) | candidates.flex(t)
        if part == "reads":
            of_path = candidates.stages(t)
            parts = {name: of_path[name] for name in ("quantise", "estimate + select")}
            dense = {"own dense": candidates.baselines(t)["own dense"]}
            return dense | parts | candidates.attend_only(t, 1) | candidates.value_sums(t)
        calls = candidates.baselines(t) | candidates.attend_only(t, 1, block)
        if part == "gather":
            return calls | candidates.gather(t, 1) | candidates.gather(t, block)
        if part != "chunk":
            return calls | candidates.sparse_paths(t, block)
        calls |= candidates.stages(t) | candidates.totals(t, 1) | candidates.totals(t, 1, estimators=("hierarchical",))
        for block_score in BLOCK_SCORES:
            calls |= candidates.totals(t, block, block_score)
        return calls

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        figures = {f"attention_{part}": draw_attention_speed(rows, part) for part in AXES if (rows.part == part).any()}
        stages = rows[rows.part == "stages"]
        figures |= {} if stages.empty else {"attention_stages": draw_stages(stages)}
        return figures | ({"attention_roofline": draw_roofline(rows)} if (rows.part == "chunk").any() else {})

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A table for each part, and the targets."""
        parts = [_part_table(part_rows, f"{title} · {part}") for part, part_rows in rows.groupby("part", sort=False)]
        return Group(*parts, *([targets_table(rows)] if rows.part.isin(("chunk", "memory")).any() else []))


def rows_of(row: AttentionRow, part: str, case: Case, figures: dict[str, list[float]]) -> Iterator[AttentionRow]:
    """Time of each candidate, and how many times faster than each dense baseline it is; `row` has what all rows share."""
    heads, kv_heads, dim = SHAPES[case.shape]
    row = replace(row, part=part, model=case.shape, dtype=case.dtype_name, heads=heads, kv_heads=kv_heads, head_dim=dim)
    row = replace(row, context_tokens=case.keys, chunk_rows=case.rows, retention=case.retention)

    def one(method: str, metric: str, value: float, unit: str, n: int) -> AttentionRow:
        labels = candidates.labels(method)
        return replace(row, method=method, metric=metric, value=value, unit=unit, n=n, low=value, high=value, **labels)

    if part == "memory":
        for name, (peak,) in figures.items():
            yield one(name, "peak beyond q, k, v and output", peak / 1e6, "MB", 1)
        return
    timings = {name: Timing(tuple(seconds)) for name, seconds in figures.items()}
    if part == "stages":
        yield from _stage_rows(one, timings)
        return
    if part == "machine":
        for name, timing in timings.items():
            peak = PEAKS[name]
            of = one("machine", peak.metric, peak.rates(timing)[0], peak.unit, len(timing.seconds))
            yield replace(of, flag=peak_flag(name))
        return
    if part == "chunk":
        pairs = zip(timings["estimate + select"].seconds, timings["estimate"].seconds, strict=True)
        timings["select"] = Timing(tuple(both - estimate for both, estimate in pairs))
    for name, timing in timings.items():
        n, (low, high) = len(timing.seconds), timing.quartiles_s
        flag = _NO_DIFFERENCE if timing.median_s < 0 else ""
        yield replace(one(name, "time", timing.median_s * 1e3, "ms", n), low=low * 1e3, high=high * 1e3, flag=flag)
        if part == "reads":
            continue
        if name == "select":
            yield replace(one(name, "share of sdpa", 1 / ratio(timings["sdpa"], timing), "1", n), flag=flag)
            continue
        for baseline in BASELINES:
            yield one(name, f"times faster than {baseline}", ratio(timings[baseline], timing), "1", n)


def _stage_rows(one: Callable[..., AttentionRow], timings: dict[str, Timing]) -> Iterator[AttentionRow]:
    """The time of each path and of its stages; how many times as long it takes with the kernels' clocks running, and how many
    times faster than our dense attention it is with them stopped."""

    def spread(method: str, metric: str, timing: Timing) -> AttentionRow:
        low, high = timing.quartiles_s
        row = one(method, metric, timing.median_s * 1e3, "ms", len(timing.seconds))
        return replace(row, low=low * 1e3, high=high * 1e3)

    dense = timings["own dense"]
    for name in [name for name in timings if f"{name}: {OUTSIDE}" in timings]:
        stages, n = {stage: timings[f"{name}: {stage}"] for stage in candidates.STAGES}, len(dense.seconds)
        whole = Timing(tuple(np.sum([timing.seconds for timing in stages.values()], axis=0)))
        yield spread(name, "time", timings[name])
        if name != "own dense":
            yield one(name, "times faster than own dense", ratio(dense, timings[name]), "1", n)
        yield one(name, "time with stages timed", ratio(whole, timings[name]), "1", n)
        for stage, metric in candidates.stage_metrics(name).items():
            if any(timings[f"{name}: {stage}"].seconds):
                yield spread(name, metric, timings[f"{name}: {stage}"])


def _part_table(rows: pd.DataFrame, title: str) -> Table:
    """Times with quartiles, and ratios to both baselines."""
    first = rows.iloc[0]
    title = f"{title} · {first.processor}, {first.threads} threads, {first.kernel} · measured"
    table = Table("case", "candidate", "value", "quartiles", "× sdpa", "× own dense", title=title)
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows.itertuples():
        case = f"{row.model} {row.dtype} {row.context_tokens} keys, {row.retention:g}"
        cells.setdefault(case, {}).setdefault(row.method, {})[row.metric] = row
    for case, methods in cells.items():
        for method, by_metric in methods.items():
            ratios = [by_metric.pop(f"times faster than {baseline}", None) for baseline in BASELINES]
            share = by_metric.pop("share of sdpa", None)
            for main in by_metric.values():
                what = f"{main.metric} " if main.metric != "time" else ""
                value = f"{what}{main.value:.2f} {main.unit}" + (f"  ({share.value:.1%} of sdpa)" if share else "")
                spread = f"{main.low:.2f} … {main.high:.2f}" if main.unit == "ms" else ""
                table.add_row(case, method, value, spread, *(f"{one.value:.2f}" if one else "" for one in ratios))
                case = ""
        table.add_section()
    return table
