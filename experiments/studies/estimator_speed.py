"""From how many keys on a chunk with each estimator is faster than dense attention: estimate, lists and attention, timed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.cells import estimator_of
from experiments.lab import Lab
from experiments.part_building import part_name
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.interleave import Timing, interleave, ratio
from shadowattn.kernels import choose
from shadowattn.online.chunk import Chunk
from shadowattn.online.executor import Threads, run_batched
from shadowattn.online.stages import Parts, Stages
from shadowattn.reporting.figures.estimator_speed import draw as draw_estimator_speed
from shadowattn.reporting.rows import SpreadRow
from shadowattn.types import Heads

_RATIO, _BREAK_EVEN = "times_faster_than_dense", "break_even_keys"


@dataclass(frozen=True)
class EstimatorSpeed(Study):
    """The methods of a comparison on a chunk of random tensors of the model's first layer, with its heads' retentions, against
    each of `lengths` keys.

    A call estimates, selects and attends, for all heads, with what was derived of earlier keys at hand, as in a prefill. Dense
    attention is ours. Methods take turns, for `rounds` rounds at every length. Estimators of other papers are torch, `int8_fused`
    is compiled: the break-even is that of the implementations here, not of the methods.
    """

    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192, 16384])
    rounds: int = 7
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "seed", "retention", "retentions", "method", "compare", "estimator", "allocator", "selection"),
        *("importance", "sensitivity", "calibration", "key_offset", "grid", "graphs", "evaluation"),
        *("device", "kernel", "threads"),
    )
    headline: ClassVar[tuple[str, ...]] = (_RATIO, _BREAK_EVEN)

    def __post_init__(self):
        check_count("study.rounds", self.rounds)
        if len(self.lengths) < 2 or sorted(set(self.lengths)) != list(self.lengths):
            raise InputError(f"study.lengths: expected two or more, ascending, got {list(self.lengths)}")

    def check(self, lab: Lab) -> None:
        check_count("study.lengths", min(self.lengths), least=lab.of("graphs").chunk_tokens)
        if not any(at < 1 for at in lab.retentions):
            raise InputError(f"retentions: expected one below 1, where lists leave keys out, got {lab.retentions}")
        for name, method in lab.methods.items():
            if method.needs & {"bank", "nncf_graph"} or method.on_device:
                raise InputError(
                    f"{name}: {part_name(method.estimator)} has graphs of the evaluation's lengths; use estimator=int8_fused, "
                    "which ranks the same keys, or +exp=fig15, which times graphs"
                )

    def measure(self, lab: Lab) -> list[SpreadRow]:
        units, rows = lab.units("times"), []
        pieces = [(at, keys) for at in lab.retentions if at < 1 for keys in self.lengths]
        say(f"time: {len(lab.methods)} methods and dense at {len(pieces)} retentions and lengths, random tensors")
        for at, keys in bar(pieces, "lengths"):
            seconds = units.get(f"{keys}@{at:g}", lambda at=at, keys=keys: self._seconds(lab, at, keys))
            rows += self._rows(lab, at, keys, {name: Timing(tuple(durations)) for name, durations in seconds.items()})
        return rows + self._break_evens(rows)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"estimator_speed": draw_estimator_speed(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A table a retention, a line a method, the earliest break-even first."""
        tables = []
        for at, some in rows[rows.retention < 1].groupby("retention"):
            ratios = some[some.metric == _RATIO].pivot(index="method", columns="context_tokens", values="value")
            even = some[some.metric == _BREAK_EVEN].set_index("method").value
            table = Table(
                "method", "break-even, keys", *(f"{keys} keys" for keys in ratios.columns),
                title=f"{title}, retention {at:g} · times faster than dense, medians of {some.n.iloc[0]} rounds",
                title_justify="left",
            )  # fmt: skip
            for method in even.index[np.lexsort([-ratios.loc[even.index].iloc[:, -1], even])]:
                table.add_row(method, said_break_even(even[method], max(self.lengths)), *(f"{x:.2f}" for x in ratios.loc[method]))
            tables.append(table)
        return Group(*tables)

    def _seconds(self, lab: Lab, retention: float, keys: int) -> dict[str, list[float]]:
        shape, rows = lab.shape, lab.of("graphs").chunk_tokens
        generator = torch.Generator().manual_seed(lab.seed)
        q = torch.randn(shape.heads, rows, shape.head_dim, generator=generator)
        k, v = torch.randn(2, shape.kv_heads, keys, shape.head_dim, generator=generator)
        kernels = choose(lab.kernel, head_dim=shape.head_dim, dtype=q.dtype)
        heads, scale = Heads.all(shape.heads, shape.kv_heads), shape.head_dim**-0.5
        calls: dict[str, Callable] = {"dense": lambda: kernels.dense(q, k, v, heads, causal_offset=keys - rows, scale=scale)}
        for name, method in lab.methods.items():
            profile = lab.offline.profile(method.allocator, retention)
            parts = Parts(estimator_of(lab, method, profile), method.rule, kernels)
            chunk = Chunk.of(q, k, v, retention=profile.retention[0], scale=scale)
            calls[name] = lambda chunk=chunk, parts=parts: run_batched(
                Stages(chunk.rewound(), parts), threads=Threads(), keep_lists=False
            )
        return {name: list(timing.seconds) for name, timing in interleave(calls, rounds=self.rounds).items()}

    def _rows(self, lab: Lab, retention: float, keys: int, timings: Mapping[str, Timing]) -> list[SpreadRow]:
        common = replace(lab.timing_row(SpreadRow), n=self.rounds, context_tokens=keys, chunk_rows=lab.of("graphs").chunk_tokens)
        dense, rows = timings["dense"], []
        for name, timing in timings.items():
            row = common
            if method := lab.methods.get(name):
                row = replace(
                    common, method=name, retention=retention, estimator=part_name(method.estimator),
                    allocator=part_name(method.allocator), **method.selection,
                )  # fmt: skip
            low, high = (1e3 * x for x in timing.quartiles_s)
            rows.append(replace(row, metric="chunk_time", value=1e3 * timing.median_s, low=low, high=high, unit="ms"))
            if method:
                low, high = np.percentile(np.divide(dense.seconds, timing.seconds), (25, 75))
                rows.append(replace(row, metric=_RATIO, value=ratio(dense, timing), low=float(low), high=float(high), unit="1"))
        return rows

    def _break_evens(self, rows: Sequence[SpreadRow]) -> list[SpreadRow]:
        """One a method and retention: the fewest of `lengths` from which on it is faster than dense at each."""
        found: dict[tuple[str, float], list[SpreadRow]] = {}
        for row in rows:
            if row.metric == _RATIO:
                found.setdefault((row.method, row.retention), []).append(row)
        return [
            replace(some[-1], metric=_BREAK_EVEN, value=break_even_keys({row.context_tokens: row.value for row in some}),
                    unit="keys", low=0.0, high=0.0)
            for some in found.values()
        ]  # fmt: skip


def break_even_keys(ratios: Mapping[int, float]) -> float:
    """Of times faster than dense by length: the least length from which on all are above 1; infinite where the last is not."""
    least = math.inf
    for keys in sorted(ratios, reverse=True):
        if ratios[keys] <= 1:
            break
        least = float(keys)
    return least


def said_break_even(keys: float, longest: int) -> str:
    """A break-even for a table; `longest` is the greatest length that was measured."""
    return f"{keys:.0f}" if math.isfinite(keys) else f"above {longest}"
