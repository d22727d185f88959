"""Operations, bytes and time of each stage of a prefill and of a decode, beside what the machine can do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from torch import Tensor

from experiments.engines import refuse_form, refuse_look_ahead
from experiments.lab import Lab
from experiments.machine_peaks import PEAKS, peak_calls, peak_flag
from experiments.progress import bar, say
from experiments.refusals import check_choice, check_count
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.graphs.cpu import multiplies_in_bfloat16
from shadowattn.graphs.decoder.blocks import BlockSizes
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.graphs.decoder.runner import Blocks
from shadowattn.graphs.decoder.tensors import layer_tensors
from shadowattn.interleave import Timing, interleave
from shadowattn.kernels import NativeKernels, native
from shadowattn.models.decoder import Decoder, read_decoder
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.selection import Rule
from shadowattn.reporting.figures.stage_roofline import draw as draw_stage_roofline
from shadowattn.reporting.rows import SpreadRow
from shadowattn.types import BLOCK_POINTS, Lists

PRECISIONS = {"float32": 4, "bfloat16": 4, "w8a8": 1}  # and the bytes of a weight: the graphs of bfloat16 read float32
ARITHMETIC = {"float32": "float32", "bfloat16": "bfloat16", "w8a8": "int8"}
_HEAD = "output layer"
_THROUGH = (
    1.25  # times the budget: what a first look lets through in `conf/estimator/hierarchical.yaml`, whose spared heads have none
)
_DENSE, _TASK, _LOOKED = "attend dense", "one task", "one task after a first look"
_ATTENTION = (_DENSE, _TASK, _LOOKED)
_PREFILL = (*(f"blocks {one}" for one in PRECISIONS), *_ATTENTION, *(f"{one} bfloat16" for one in _ATTENTION))
_LEGEND = (
    "operations: products and sums, two for each multiply-accumulate; bytes: every tensor read or written once\n"
    "all layers: the stage's time in a step of the whole model\n"
    "of the roof: the rate reached, of the lesser of the arithmetic's peak and the bandwidth at so many operations a byte"
)


@dataclass(frozen=True)
class RooflineRow(SpreadRow):
    """A stage of one layer, or a peak of the machine (`stage` empty): of the fastest round, with the slower
    quartile as `low`.

    `phase` prefill or decode; `batch` sequences, each with a cache of its own; `arithmetic` float32, bfloat16 or int8: whose peak
    is the roof, with the other arithmetic's where a stage has two; `operations` and `bytes` are counted, of one call.
    """

    phase: str = ""
    stage: str = ""
    batch: int = 1
    arithmetic: str = ""
    operations: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Stage:
    """One stage of one layer: its call, and what it has to compute and to move. `more`: operations in other arithmetics."""

    call: Callable[[], object]
    arithmetic: str
    operations: float
    bytes: float
    sparse: bool = False
    more: Mapping[str, float] = field(default_factory=dict)

    def least_seconds(self, peaks: Mapping[str, float]) -> float:
        """By the arithmetics' peaks, one after the other, or by the bandwidth."""
        computed = sum(count / peaks[f"peak {name}"] for name, count in ({self.arithmetic: self.operations} | self.more).items())
        return max(computed, self.bytes / peaks["bandwidth"]) / 1e9


@dataclass(frozen=True)
class Roofline(Study):
    """Stages of the engine's first layer on random tensors: a chunk of `engine.chunk_tokens` rows at the end of each of `lengths`
    keys, and a decoding step of each of `batches` sequences there.

    Blocks in each of `precisions`; of attention the dense form and, at `retention` in float32, the INT8 estimate alone, whose
    scores are written to memory, and with selection, attention to what it kept, all in one task, the same in a prefill after a
    first look that lets 1.25 times the budget through (`hierarchical` with no head spared), and selection alone from float16
    scores as an NPU returns them; with bfloat16 among the precisions also dense attention and the tasks in it; the output layer
    for a step's last rows. Peaks are those of `machine_peaks`. All take turns for `rounds` rounds.
    """

    lengths: list[int] = field(default_factory=lambda: [1024, 8192])
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    precisions: list[str] = field(default_factory=lambda: ["float32", "bfloat16", "w8a8"])
    rounds: int = 9
    needs: ClassVar[tuple[str, ...]] = ("model", "seed", "retention", "engine", "threads")
    headline: ClassVar[tuple[str, ...]] = ("time", "of the roof")

    def __post_init__(self):
        check_count("study.rounds", self.rounds)
        for name in ("lengths", "batches", "precisions"):
            if not getattr(self, name):
                raise InputError(f"study.{name}: expected at least one, got none")
        for precision in self.precisions:
            check_choice("study.precisions", precision, tuple(PRECISIONS))
        check_count("study.batches", min(self.batches))

    def check(self, lab: Lab) -> None:
        native.require()
        refuse_look_ahead(lab, "stages are timed one by one here")
        refuse_form(lab, "use study.precisions")
        check_count("study.lengths", min(self.lengths), least=lab.of("engine").chunk_tokens)
        if not 0 < lab.of("retention") < 1:
            raise InputError(f"retention: expected a share below 1, where lists leave keys out, got {lab.of('retention')}")
        if "bfloat16" in self.precisions and not multiplies_in_bfloat16():
            others = ",".join(one for one in self.precisions if one != "bfloat16") or "float32"
            raise InputError(
                "study.precisions: bfloat16 needs a processor with such products, which OpenVINO does not find here; use "
                f"study.precisions=[{others}]"
            )

    def measure(self, lab: Lab) -> list[RooflineRow]:
        decoder, rows = read_decoder(lab.loaded.model), lab.of("engine").chunk_tokens
        cases = [("prefill", 1, keys) for keys in self.lengths]
        cases += [("decode", batch, keys) for keys in self.lengths for batch in self.batches]
        say(f"roofline: {len(cases)} cases of one layer, {lab.of('engine').chunk_tokens} rows in a prefill, random tensors")
        units, made = lab.units("times"), []
        row = replace(lab.timing_row(RooflineRow), method="machine", n=self.rounds, retention=1.0)
        timings = _timings(units.get("machine", lambda: _seconds(peak_calls(), self.rounds)))
        for name, timing in timings.items():
            value, low, high = PEAKS[name].rates(timing)
            of = replace(row, metric=PEAKS[name].metric, unit=PEAKS[name].unit, flag=peak_flag(name))
            made.append(replace(of, value=value, low=low, high=high))
        peaks = {one.metric: one.value for one in made}
        for phase, batch, keys in bar(cases, "cases"):
            stages = self._stages(decoder, lab.of("retention"), phase, rows if phase == "prefill" else 1, batch, keys)
            key = f"{phase}_{batch}_{keys}_{len(stages)}"
            timings = _timings(units.get(key, lambda s=stages: _seconds({n: one.call for n, one in s.items()}, self.rounds)))
            for name, stage in stages.items():
                about = replace(
                    row, method=name, phase=phase, stage=name, batch=batch, context_tokens=keys, arithmetic=stage.arithmetic,
                    operations=stage.operations + sum(stage.more.values()), bytes=stage.bytes,
                    retention=lab.of("retention") if stage.sparse else 1.0,
                    chunk_rows=rows if phase == "prefill" else 1,
                )  # fmt: skip
                times = 1 if name == _HEAD else decoder.shape.layers
                made += _stage_rows(about, timings[name], times, stage.least_seconds(peaks))
        return made

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"roofline": draw_stage_roofline(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A table a phase, length and batch: the stages, what they compute and move, and how near the roof they come."""
        peaks = rows[rows.method == "machine"]
        shown = ", ".join(f"{row.metric} {row.value:.4g} {row.unit}" for row in peaks.itertuples())
        tables = []
        for (phase, keys, batch), cell in rows[rows.stage != ""].groupby(["phase", "context_tokens", "batch"], sort=False):
            values = cell.set_index(["stage", "metric"]).value
            table = Table(
                "stage", "arithmetic", "10⁶ operations", "MB", "operations a byte", "ms", "all layers, ms", "10⁹ operations/s",
                "of the roof", "bound by",
                title=f"{title} · {phase}, batch {batch}, {keys} keys", title_justify="left",
            )  # fmt: skip
            for row in cell.drop_duplicates("stage").itertuples():
                of = values[row.stage]
                table.add_row(
                    row.stage, row.arithmetic, f"{row.operations / 1e6:.4g}", f"{row.bytes / 1e6:.4g}",
                    f"{row.operations / row.bytes:.3g}", f"{of['time']:.3g}", f"{of['time in all layers']:.4g}",
                    f"{of['rate']:.3g}", f"{of['of the roof']:.0%}",
                    bound_by(row.operations / row.bytes, row.arithmetic, peaks),
                )  # fmt: skip
            tables.append(table)
        return Group(*tables, _prefill_table(rows), f"peaks: {shown}", _LEGEND)

    def _stages(self, decoder: Decoder, retention: float, phase: str, rows: int, batch: int, keys: int) -> dict[str, Stage]:
        """One layer's stages by name; `rows` of each of `batch` sequences."""
        stages = {f"blocks {one}": _blocks(decoder, one, rows * batch) for one in self.precisions}
        stages |= _attention(decoder, retention, rows, batch, keys)
        if "bfloat16" in self.precisions:
            found = _attention(decoder, retention, rows, batch, keys, torch.bfloat16)
            stages |= {f"{name} bfloat16": found[name] for name in _ATTENTION if name in found}
        hidden, head = torch.randn(batch, decoder.hidden), decoder.head.float()
        operations, moved = 2.0 * batch * head.numel(), 4.0 * (head.numel() + batch * sum(head.shape))
        return stages | {_HEAD: Stage(lambda: hidden @ head.T, "float32", operations, moved)}


def _prefill_table(rows: pd.DataFrame) -> Table:
    seconds = prefill_seconds(rows)
    table = Table("stage", "tokens", "seconds", "by the roof", title="a whole prompt, by its last chunk", title_justify="left")
    for (stage, tokens), of in seconds.iterrows():
        table.add_row(stage, f"{tokens}", f"{of.taken:.3g}", f"{of.least:.3g}")
    return table


def bound_by(intensity: float, arithmetic: str, peaks: pd.DataFrame) -> str:
    """What limits a stage of so many operations a byte: the arithmetic, or the memory's bandwidth."""
    of = peaks.set_index("metric").value
    return "arithmetic" if intensity * of["bandwidth"] >= of[f"peak {arithmetic}"] else "bandwidth"


def prefill_seconds(rows: pd.DataFrame) -> pd.DataFrame:
    """Seconds of a whole prompt in the blocks, in dense attention and in the tasks: index stage, context_tokens.

    `taken`: as if all chunks went at the rate of the last, which was measured; `least`: at that chunk's roof. Blocks take whole
    chunks, and attention what its rows see: the keys up to their own.
    """
    of = rows[(rows.phase == "prefill") & rows.stage.isin(_PREFILL)]
    values = of.pivot_table(index=["stage", "context_tokens", "chunk_rows"], columns="metric", values="value", sort=False)
    keys, height = (values.index.get_level_values(name).to_numpy(float) for name in ("context_tokens", "chunk_rows"))
    blocks = values.index.get_level_values("stage").str.startswith("blocks")
    seen = (keys * (keys + 1)) / (height * (2 * keys - height + 1))  # by all rows, over those that the last chunk sees
    taken = values["time in all layers"] / 1e3 * np.where(blocks, np.ceil(keys / height), seen)
    return pd.DataFrame({"taken": taken, "least": taken * values["of the roof"]}).droplevel("chunk_rows")


def _blocks(decoder: Decoder, precision: str, rows: int) -> Stage:
    """Both blocks of the first layer, with weights as inputs."""
    shape, form = decoder.shape, BlockForm(precision=precision)
    attended = shape.heads * shape.head_dim
    channels = {"qkv": decoder.hidden, "out": attended, "mlp": decoder.hidden, "down": decoder.intermediate}
    ranges = {point: torch.ones(channels[point]) for point in BLOCK_POINTS} if form.needs_ranges else {}
    tensors = layer_tensors(decoder.layers[0], form, ranges)
    sizes = BlockSizes(rows, decoder.hidden, attended, decoder.activation, decoder.norm_eps)
    blocks, out = Blocks(sizes, form, [tensors]), torch.randn(shape.heads, rows, shape.head_dim)
    blocks.begin(torch.randn(rows, decoder.hidden))
    matrices = [x for name, x in (tensors.pre | tensors.post).items() if name.endswith(".weight")]
    weights = sum(x.numel() for x in matrices)
    moved = PRECISIONS[precision] * weights + 4.0 * rows * (3 * decoder.hidden + matrices[0].shape[0] + attended)

    def call() -> None:
        blocks.qkv(0)
        blocks.finish(0, out)

    return Stage(call, ARITHMETIC[precision], 2.0 * rows * weights, moved)


def _attention(
    decoder: Decoder, retention: float, rows: int, batch: int, keys: int, dtype: torch.dtype = torch.float32
) -> dict[str, Stage]:
    """Dense attention, and sparse attention's parts, apart and as one task; `batch` caches one after the other."""
    shape, kernels, rule = decoder.shape, NativeKernels(), Rule()
    chunks = [_chunk(decoder, retention, rows, keys, seed, dtype) for seed in range(batch)]
    arithmetic, size = ("float32", 4) if dtype == torch.float32 else ("bfloat16", 2)
    estimators = [Int8Fused.of(chunk.q, chunk.k) for chunk in chunks]
    looking = [replace(Hierarchical.of(chunk.q, chunk.k), candidates=_THROUGH) for chunk in chunks]
    lists = rule.lists(chunks[0].retention, chunks[0].positions)
    kept = [one.select(chunk, rule, lists, kernels) for one, chunk in zip(estimators, chunks, strict=True)]
    scores = [(one.scores(chunk) / 127**2).half() for one, chunk in zip(estimators, chunks, strict=True)]
    visible = float((chunks[0].positions + 1).sum()) * shape.heads * batch  # rows of all heads and the keys that they see
    share = lists.size / visible * batch
    q_size, k_size = (float(batch * count * shape.head_dim) for count in (rows * shape.heads, keys * shape.kv_heads))

    def dense() -> None:
        for chunk in chunks:
            kernels.dense(chunk.q, chunk.k, chunk.v, chunk.heads, causal_offset=keys - rows, scale=chunk.scale)

    def estimate() -> None:
        for one, chunk in zip(estimators, chunks, strict=True):
            one.scores(chunk)

    def choose() -> None:
        for one, chunk in zip(estimators, chunks, strict=True):
            one.select(chunk, rule, lists, kernels)

    def attend() -> None:
        for chunk, selection in zip(chunks, kept, strict=True):
            kernels.attend(chunk.q, chunk.k, chunk.v, selection, chunk.heads, scale=chunk.scale)

    def select() -> None:
        for of in scores:
            kernels.select(of, lists)

    def together(those: Sequence[Int8Fused]) -> None:
        for one, chunk in zip(those, chunks, strict=True):
            one.attend(chunk, rule, lambda: lists, listed=False)

    operations = 2.0 * visible * shape.head_dim
    entries = share * visible  # of all lists
    attends = {arithmetic: 2 * operations * share}
    read = min(2 * k_size, 2 * entries * shape.head_dim)  # of K and V, where lists hold fewer than all keys together
    whole = size * (2 * q_size + read) + k_size
    stages = {
        _DENSE: Stage(dense, arithmetic, 2 * operations, size * (2 * q_size + 2 * k_size)),
        "estimate": Stage(estimate, "int8", operations, size * q_size + k_size + 4 * batch * shape.heads * rows * keys),
        "estimate + select": Stage(choose, "int8", operations, size * q_size + k_size + 4 * entries, sparse=True),
        # A comparison a score.
        "select": Stage(select, "float32", visible, 2 * batch * shape.heads * rows * keys + 4 * entries, sparse=True),
        "attend sparse": Stage(attend, arithmetic, 2 * operations * share, size * (2 * q_size + read) + 4 * entries, sparse=True),
        _TASK: Stage(partial(together, estimators), "int8", operations, whole, True, attends),
    }
    if rows > 1:  # a single row is a block of its own, whose first look would be the estimate
        looked = 2.0 * shape.head_dim * batch * _looked_at(chunks[0].positions, lists, looking[0].block_rows)
        stages[_LOOKED] = Stage(partial(together, looking), "int8", looked, whole, True, attends)
    return stages


def _looked_at(positions: Tensor, lists: Lists, block: int) -> float:
    """Products of a query with a key, of all heads: of each block's mean query with the keys up to its first row, and of each row
    with those that came through, the `block` keys up to the first row and the block's own up to itself.
    """
    first = torch.arange(len(positions)) // block * block
    last = (first + block - 1).clamp(max=len(positions) - 1)
    through = (_THROUGH * lists.indptr.diff().view(-1, len(positions))[:, last]).ceil()  # [H, Q]
    seen, start = positions + 1, positions[first] + 1
    ranked = torch.minimum(through + block + (seen - start), seen)
    return float(ranked.sum() + len(ranked) * start[::block].sum())


def _chunk(decoder: Decoder, retention: float, rows: int, keys: int, seed: int, dtype: torch.dtype) -> Chunk:
    shape, generator = decoder.shape, torch.Generator().manual_seed(seed)

    def random(count: int, length: int) -> Tensor:
        return torch.randn(count, length, shape.head_dim, generator=generator).to(dtype)

    return Chunk.of(random(shape.heads, rows), random(shape.kv_heads, keys), random(shape.kv_heads, keys), retention=retention)


def _stage_rows(row: RooflineRow, timing: Timing, times: int, least_s: float) -> Iterator[RooflineRow]:
    """`times`: how often a step of the whole model has the stage."""
    low, high = timing.quartiles_s
    for metric, factor in (("time", 1e3), ("time in all layers", 1e3 * times)):
        yield replace(row, metric=metric, value=factor * timing.median_s, low=factor * low, high=factor * high, unit="ms")
    rates = [row.operations / seconds / 1e9 for seconds in (timing.median_s, high, low)]
    yield replace(row, metric="rate", value=rates[0], low=rates[1], high=rates[2], unit="GOP/s")
    shares = [least_s / seconds for seconds in (timing.median_s, high, low)]
    yield replace(row, metric="of the roof", value=shares[0], low=shares[1], high=shares[2], unit="1")


def _seconds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    return {name: list(timing.seconds) for name, timing in interleave(calls, rounds=rounds, warmup=2).items()}


def _timings(seconds: Mapping[str, Sequence[float]]) -> dict[str, Timing]:
    return {name: Timing(tuple(durations)) for name, durations in seconds.items()}
