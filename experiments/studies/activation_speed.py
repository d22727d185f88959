"""The whole sparse path against dense attention on the queries, keys and values of a model, and not on random tensors.

Real rows rank keys that lie together and change slowly from row to row; random ones do neither. Both decide how fast lists are
made and read.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from torch import Tensor

from experiments.first_looks import FirstLook
from experiments.lab import Lab
from experiments.levels import at_level, check_level
from experiments.progress import bar, say
from experiments.random_layers import Case, Tensors
from experiments.refusals import check_choice, check_count
from experiments.studies import attention_candidates as candidates
from experiments.studies.base import Study
from experiments.studies.estimator_speed import break_even_keys, said_break_even
from shadowattn import checks
from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.interleave import Timing, interleave, ratio
from shadowattn.kernels import native
from shadowattn.machine import processor
from shadowattn.models.load import DTYPES
from shadowattn.offline import observe_key_offset
from shadowattn.offline.first_looks import list_mass
from shadowattn.online.chunk import Chunk
from shadowattn.reporting.figures.activation_speed import draw as draw_activation_speed
from shadowattn.reporting.figures.attention_stages import STAGE
from shadowattn.reporting.figures.attention_stages import draw as draw_stages
from shadowattn.reporting.rows import LayerTimeRow
from shadowattn.types import FirstLookLosses, KeyOffset

_WARMUP = 1
_OF_ROWS = ("int8_fused", "hierarchical")  # whose rows have lists of their own
# Parts of the path of `int8_fused`: what it does before its products, these alone, and these with what they choose.
_QUANTISE, _ESTIMATE, _CHOOSE = "quantise", "estimate", "choose"
_ONCE = ("sdpa", "own_dense", _QUANTISE, _ESTIMATE)  # the same at every retention
_SCORE = "probability"  # the block score that loses least
_LOOK_TOKENS, _LOOK_WINDOWS = 2048, 2  # of calibration text


class Captured(Tensors):
    """The queries, keys and values of a chunk that a model computed, in `dtype`, each head at `retention`."""

    def __init__(self, chunk: Chunk, dtype: torch.dtype, retention: float):
        """In `dtype` already, they are not copied."""
        self.q, self.k, self.v = (x.to(dtype).contiguous() for x in (chunk.q, chunk.k, chunk.v))
        self.case = Case("", dtype, chunk.keys, chunk.q.shape[1], retention)
        self.heads, self.scale, self.positions, self.layer = chunk.heads, chunk.scale, chunk.positions, chunk.layer
        self.retention = torch.full((len(chunk.heads),), retention, dtype=torch.float64)


class Calibrated(NamedTuple):
    """What a first look costs each head, what is taken off K before it is quantised, and how many heads are spared the look."""

    first_look: FirstLookLosses
    key_offset: KeyOffset | None = None
    flat_share: float = candidates.LOOKED["flat_share"]


@dataclass(frozen=True)
class ActivationSpeed(Study):
    """The last `rows` rows of the first `lengths` tokens of every held-out window, in a dense prefill, of every layer.

    At each of `retentions`: lists for every row, by `int8_fused` and by `hierarchical`, whose first look lets `through` times
    the budget through and spares `flat_share` of the heads, those that lose most by it on calibration text, and for blocks of
    `query_blocks` rows by estimated probabilities. Candidates take turns layer by layer for `rounds` rounds; a time is the
    median over rounds of the sum over layers and windows. Among them are two parts of the path of `int8_fused`: `quantise`, and
    `choose`, products and selection. `estimate`, the products alone, which no path computes apart, takes its turns apart. So do
    the paths once more, of whose stages clocks in the kernels then say how long they take. `mass_recall` is the share of exact
    attention that stands on the lists of single rows, the mean over rows, heads, layers and windows.
    Kernels are those of `level` where it names one, as another processor would run them, on this one's caches and clock.
    """

    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096])
    retentions: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.2])
    query_blocks: list[int] = field(default_factory=lambda: [8, 32])
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    rows: int = 512
    rounds: int = 7
    through: float = candidates.LOOKED["candidates"]
    flat_share: float = candidates.LOOKED["flat_share"]
    level: str | None = None
    needs: ClassVar[tuple[str, ...]] = ("model", "data", "evaluation", "seed", "threads", "key_offset")
    headline: ClassVar[tuple[str, ...]] = (
        *("times_faster_than_own_dense", "times_faster_than_sdpa", "break_even_keys", "mass_recall"),
    )

    def __post_init__(self):
        for name in ("lengths", "retentions", "dtypes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise InputError(f"study.{name}: expected at least one and none twice, got {list(values)}")
        for dtype in self.dtypes:
            check_choice("study.dtypes", dtype, tuple(DTYPES))
        if not all(0 < retention < 1 for retention in self.retentions):
            raise InputError(f"study.retentions: expected shares of the visible keys, in (0, 1), got {list(self.retentions)}")
        check_count("study.rows", self.rows)
        check_count("study.rounds", self.rounds)
        if not 1 <= self.through < math.inf:
            raise InputError(f"study.through: expected 1 or more times the budget, got {self.through}")
        checks.number("study.flat_share", self.flat_share, least=0, most=1)
        for length in self.lengths:
            if length < self.rows or length % self.rows:
                raise InputError(f"study.lengths: expected multiples of study.rows={self.rows}, got {length}")
        for block in self.query_blocks:
            check_count("study.query_blocks", block, least=2)

    def check(self, lab: Lab) -> None:
        check_level(self.level)
        if max(self.lengths) > lab.context_tokens:
            raise InputError(
                f"study.lengths: expected at most the {lab.context_tokens} tokens of a window, got {max(self.lengths)}; set "
                "study.lengths or evaluation.context_tokens"
            )

    def measure(self, lab: Lab) -> list[LayerTimeRow]:
        windows, units, rows, calibrated = lab.heldout(), lab.units("times"), [], self._calibrated(lab)
        say(f"time: {lab.shape.layers} layers, {len(windows)} windows, {self.rounds} rounds, candidates take turns")
        pieces = [(length, index) for length in self.lengths for index in range(len(windows))]
        measured: dict[int, list[dict[str, dict[str, list]]]] = {}
        for length, index in bar(pieces, "times"):
            with at_level(self.level):
                piece = units.get(f"{length}@{index}", partial(self._measured, lab, windows[index][:length], calibrated))
            measured.setdefault(length, []).append(piece)
        for dtype in self.dtypes:
            with at_level(self.level):
                of_dtype = [row for length in self.lengths for row in self._rows(lab, dtype, length, measured[length])]
            rows += [*of_dtype, *_break_evens(of_dtype)]
        return rows

    def _calibrated(self, lab: Lab) -> Calibrated:
        """By two windows of calibration text."""
        tokens, how = min(lab.context_tokens, _LOOK_TOKENS), lab.of("key_offset")

        def measure() -> KeyOffset:
            say(f"key offset: {how} of the keys of {lab.shape.layers * lab.shape.kv_heads} key heads")
            return observe_key_offset(
                lab.loaded.model,
                lab.calibration(tokens=tokens, windows=_LOOK_WINDOWS),
                chunk_tokens=self.rows,
                how=how,
                progress=lambda work: bar(work, "calibrate"),
            )

        key_offset = None
        if how != "none":
            inputs = {"tokens": tokens, "windows": _LOOK_WINDOWS, "chunk_tokens": self.rows, "how": how}
            key_offset = lab.stage("key_offset", inputs).result(KeyOffset, measure)
        look = FirstLook(tokens, _LOOK_WINDOWS, self.rows, self.through, candidates.LOOKED["block_rows"])
        first_look = look.losses(lab, key_offset)
        return Calibrated(first_look, key_offset, self.flat_share)

    def _measured(self, lab: Lab, window: Tensor, calibrated: Calibrated) -> dict[str, dict[str, list]]:
        """`seconds` of each round in each layer, and of `stages` in each round, and each layer's mean `mass` on lists of single
        rows, by dtype and candidate."""
        seconds: dict[str, list[list[float]]] = {}
        stages: dict[str, list[list[list[float]]]] = {}
        mass: dict[str, list[float]] = {}

        def observe(chunk: Chunk) -> None:
            if chunk.keys < len(window):
                return
            for dtype in self.dtypes:
                calls = self.calls(chunk, dtype, calibrated)
                times = interleave(calls, rounds=self.rounds, warmup=_WARMUP)
                tensors = Captured(chunk, DTYPES[dtype], self.retentions[0])
                products = {_ESTIMATE: candidates.stages(tensors, calibrated.key_offset)["estimate"]}
                times |= interleave(products, rounds=self.rounds, warmup=_WARMUP)
                clocked = {name: candidates.Clocked(call) for name, call in calls.items() if _is_clocked(name)}
                interleave(clocked, rounds=self.rounds, warmup=_WARMUP)
                for name, one in clocked.items():
                    metrics = candidates.stage_metrics(name)
                    rounds = [[spent[stage] for stage in metrics] for spent in one.seconds[-self.rounds :]]
                    stages.setdefault(f"{dtype} {name}", []).append(rounds)
                for name, timing in times.items():
                    seconds.setdefault(f"{dtype} {name}", []).append(list(timing.seconds))
                for name, kept in self.masses(chunk, dtype, calibrated).items():
                    mass.setdefault(f"{dtype} {name}", []).append(kept)
            shown.update(1)

        with bar([], f"layers of {len(window)} tokens", total=lab.shape.layers) as shown:
            observe_prefill(lab.loaded.model, window[None], observe, chunk_tokens=self.rows)
        return {"seconds": seconds, "mass": mass, "stages": stages}

    def calls(self, chunk: Chunk, dtype: str, calibrated: Calibrated) -> dict[str, candidates.Call]:
        """Dense attention; at every retention paths, by retention, rows of a list and estimator, and the part that chooses."""
        calls: dict[str, candidates.Call] = {}
        chunk = self._converted(chunk, dtype)
        for retention in self.retentions:
            tensors = Captured(chunk, DTYPES[dtype], retention)
            calls = calls or {name.replace(" ", "_"): call for name, call in candidates.baselines(tensors).items()}
            shared = ((block, "int8_fused") for block in self.query_blocks)
            for block, estimator in (*((1, estimator) for estimator in _OF_ROWS), *shared):
                (call,) = candidates.totals(tensors, block, _SCORE, (estimator,), *calibrated).values()
                calls[_key(retention, block, estimator)] = call
            parts = candidates.stages(tensors, calibrated.key_offset)
            calls[_key(retention, 1, _CHOOSE)] = parts["estimate + select"]
        return calls | {_QUANTISE: parts["quantise"]}

    def _converted(self, chunk: Chunk, dtype: str) -> Chunk:
        """A copy of the chunk that candidates of all retentions share, so that none finds keys of its own in the caches."""
        q, k, v = (x.to(DTYPES[dtype]).contiguous() for x in (chunk.q, chunk.k, chunk.v))
        return replace(chunk, q=q, layer_q=q, k=k, v=v)

    def masses(self, chunk: Chunk, dtype: str, calibrated: Calibrated) -> dict[str, float]:
        """The share of exact attention on the lists of single rows, the mean over rows and heads, by the names of `calls`."""
        masses: dict[str, float] = {}
        for retention in self.retentions:
            tensors = Captured(chunk, DTYPES[dtype], retention)
            lists = [candidates.row_lists(tensors, estimator, *calibrated) for estimator in _OF_ROWS]
            kept = list_mass(tensors.chunk(), *lists).mean(1) / tensors.case.rows
            masses |= {_key(retention, 1, estimator): float(of) for estimator, of in zip(_OF_ROWS, kept, strict=True)}
        return masses

    def _rows(self, lab: Lab, dtype: str, length: int, windows: list[dict[str, dict[str, list]]]) -> Iterator[LayerTimeRow]:
        common = replace(
            lab.row(LayerTimeRow), path_kind="timing", kernel=f"native ({native.level()})", n=self.rounds,
            context_tokens=length, chunk_rows=self.rows, dtype=dtype, processor=processor(), threads=torch.get_num_threads(),
        )  # fmt: skip

        def of_windows(kind: str) -> dict[str, Tensor]:
            names = [name for name in windows[0][kind] if name.startswith(f"{dtype} ")]
            return {
                name.removeprefix(f"{dtype} "): torch.tensor([one[kind][name] for one in windows], dtype=torch.float64)
                for name in names
            }

        layers = {name: seconds.sum(0) for name, seconds in of_windows("seconds").items()}  # [layers, rounds] of each candidate
        wholes = {name: Timing(tuple(each.sum(0).tolist())) for name, each in layers.items()}

        def described(name: str) -> LayerTimeRow:
            if name in _ONCE:
                return replace(common, method=name)
            retention, block, estimator = _read(name)
            if estimator == _CHOOSE:
                return replace(common, method=estimator, retention=retention, estimator="int8_fused", query_block=1)
            score = {"block_score": _SCORE} if block > 1 else {}
            return replace(
                common, method=_method(block, estimator), retention=retention, estimator=estimator, allocator="uniform",
                query_block=block, **score,
            )  # fmt: skip

        for name, whole in wholes.items():
            row, (low, high) = described(name), whole.quartiles_s
            yield replace(row, metric="time", value=1e3 * whole.median_s, low=1e3 * low, high=1e3 * high, unit="ms")
            if row.method in (_QUANTISE, _ESTIMATE, _CHOOSE):
                continue
            for baseline in ("own_dense", "sdpa"):
                if name == baseline:
                    continue
                quotients = torch.tensor(wholes[baseline].seconds) / torch.tensor(whole.seconds)
                low, high = torch.quantile(quotients, torch.tensor([0.25, 0.75])).tolist()
                value = ratio(wholes[baseline], whole)
                yield replace(row, metric=f"times_faster_than_{baseline}", value=value, low=low, high=high)
            if name not in ("sdpa", "own_dense"):
                for layer, (dense, sparse) in enumerate(zip(layers["own_dense"].tolist(), layers[name].tolist(), strict=True)):
                    value = ratio(Timing(tuple(dense)), Timing(tuple(sparse)))
                    yield replace(row, metric="layer_times_faster_than_own_dense", value=value, layer=layer)
        for name, spent in of_windows("stages").items():  # [windows, layers, rounds, stages]
            for metric, seconds in zip(candidates.stage_metrics(name).values(), spent.sum((0, 1)).T.tolist(), strict=True):
                timing = Timing(tuple(seconds))
                low, high = timing.quartiles_s
                if any(seconds):
                    row = replace(described(name), metric=metric, value=1e3 * timing.median_s, unit="ms")
                    yield replace(row, low=1e3 * low, high=1e3 * high)
        for name, mass in of_windows("mass").items():
            value, row = float(mass.mean()), replace(described(name), path_kind="quality", n=len(windows) * self.rows)
            yield replace(row, metric="mass_recall", value=value, low=value, high=value)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        timed = rows.metric.str.startswith(STAGE).any()  # rows of older code have none
        return {"activation_speed": draw_activation_speed(rows)} | ({"activation_stages": draw_stages(rows)} if timed else {})

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A table a dtype: times faster than our dense attention at each length, and from how many keys on."""
        tables = []
        for dtype, some in rows.groupby("dtype", sort=False):
            ratios = some[some.metric == "times_faster_than_own_dense"]
            even = some[some.metric == "break_even_keys"].set_index(["method", "retention"]).value
            lengths = sorted(some.context_tokens.unique())
            table = Table(
                "method", "retention", "break-even, keys", *(f"{keys} keys" for keys in lengths), "slowest layer", "fastest",
                title=f"{title} · {dtype}, times faster than our dense attention, medians of {some.n.iloc[0]} rounds",
                title_justify="left",
            )  # fmt: skip
            by_layer = some[(some.metric == "layer_times_faster_than_own_dense") & (some.context_tokens == lengths[-1])]
            for (method, retention), cell in ratios[ratios.method != "sdpa"].groupby(["method", "retention"], sort=False):
                values = cell.set_index("context_tokens").value
                of = by_layer[(by_layer.method == method) & (by_layer.retention == retention)].value
                table.add_row(
                    str(method), f"{retention:g}", said_break_even(even[method, retention], lengths[-1]),
                    *(f"{values[keys]:.2f}" for keys in lengths), f"{of.min():.2f}", f"{of.max():.2f}",
                )  # fmt: skip
            tables.append(table)
        return Group(*tables)


def _break_evens(rows: list[LayerTimeRow]) -> Iterator[LayerTimeRow]:
    """One a method and retention: the fewest of `lengths` from which on it is faster than our dense attention at each."""
    found: dict[tuple[str, float], list[LayerTimeRow]] = {}
    for row in rows:
        if row.metric == "times_faster_than_own_dense" and row.method != "sdpa":
            found.setdefault((row.method, row.retention), []).append(row)
    for some in found.values():
        value = break_even_keys({row.context_tokens: row.value for row in some})
        yield replace(some[-1], metric="break_even_keys", value=value, unit="keys", low=value, high=value)


def _is_clocked(key: str) -> bool:
    """Whether a candidate of `calls` is our dense attention, or a whole sparse path by kernels that time their stages."""
    if key in _ONCE:
        return key == "own_dense"
    _, block, estimator = _read(key)
    return estimator != _CHOOSE and candidates.times_stages(block)


def _key(retention: float, block: int, estimator: str) -> str:
    return f"{retention:g} {block} {estimator}"


def _read(key: str) -> tuple[float, int, str]:
    retention, block, estimator = key.split()
    return float(retention), int(block), estimator


def _method(block: int, estimator: str) -> str:
    if estimator == "hierarchical":
        return estimator
    return "per_row" if block == 1 else f"shared_{block}"
