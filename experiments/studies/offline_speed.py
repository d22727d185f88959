"""The whole importance profile: the plain method, one full forward pass for each ablation, against the one that shares work.

`plain` runs the model as transformers does. `shared, torch` shares what ablations have in common; `shared` also runs float32
linear layers by oneDNN: what a user gets. Time: the candidates take turns, slice of layers by slice of layers. Memory: each in a
process of its own, peak over what the loaded model holds, with `batch` windows. Losses are compared window by window.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from omegaconf import OmegaConf
from rich.console import Group
from rich.table import Table
from torch import Tensor

from experiments.lab import Lab
from experiments.own_process import check_memory, in_own_process, peak_bytes
from experiments.part_building import build
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.interleave import interleave
from shadowattn.models import LoadedModel, model_shape
from shadowattn.offline.ablations import zero
from shadowattn.offline.shared_ablations import measure_exactly, measure_plainly
from shadowattn.offline.work import AblationWork, plan
from shadowattn.reporting.rows import SpreadRow

CANDIDATES = ("plain", "shared, torch", "shared")
SPEED_TARGET = 1.8
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class OfflineSpeed(Study):
    """`windows` windows of `window_tokens` calibration tokens, `batch` at a time; `rounds` turns of each candidate on every slice
    of `slice_layers` layers."""

    windows: int = 16
    window_tokens: int = 128
    batch: int = 8
    rounds: int = 5
    slice_layers: int = 8
    needs: ClassVar[tuple[str, ...]] = ("model", "data", "threads")
    headline: ClassVar[tuple[str, ...]] = ("times_faster", "seconds")

    def __post_init__(self):
        for name, least in (("windows", 1), ("window_tokens", 2), ("batch", 1), ("rounds", 1), ("slice_layers", 1)):
            check_count(f"study.{name}", getattr(self, name), least=least)

    def check(self, lab: Lab) -> None:
        check_memory("this study measures it; run it on Linux")
        if self.window_tokens > lab.shape.context_tokens:
            raise InputError(
                f"study.window_tokens: the model's context is {lab.shape.context_tokens} tokens, got {self.window_tokens}; "
                "set it to no more"
            )
        self._windows(lab, 1)

    def measure(self, lab: Lab) -> list[SpreadRow]:
        loaded, windows, units = lab.loaded, self._windows(lab, self.windows), lab.units("slices")
        slices = self.slices(loaded)
        ablations = sum(len(piece.keys) for part in slices for piece in part)
        say(
            f"importance: {ablations} ablations of {len(windows)} × {self.window_tokens} tokens, {self.rounds} rounds of each way"
        )
        plain = [piece for piece in slices[-1] if piece.layer == model_shape(loaded.model).layers]
        parts = []
        for index, part in enumerate(bar(slices, "time")):
            if not units.has(str(index)):
                self.time_slice(loaded, windows, plain, 1)  # a warm-up
            parts.append(units.get(str(index), partial(self.time_slice, loaded, windows, part, self.rounds)))
        model, few = OmegaConf.to_container(lab.of("model"), resolve=True), self._windows(lab, self.batch)
        row = replace(lab.timing_row(SpreadRow), data=lab.corpus.name, corpus_sha256=lab.corpus.sha256)
        row = replace(row, context_tokens=self.window_tokens, n=self.rounds)
        rows = []
        for name, (seconds, faster) in summarise(parts).items():
            method_row = replace(row, method=name)
            rows.append(_spread(replace(method_row, metric="seconds", unit="s"), seconds))
            rows.append(_spread(replace(method_row, metric="times_faster", unit="1"), faster))
            peak = units.get(f"memory-{name}", partial(in_own_process, own_peak_bytes, name, model, few, self.batch))
            rows.append(_exactly(replace(method_row, metric="peak_bytes", unit="bytes", n=1), peak))
            worst = max(part["difference"].get(name, 0.0) for part in parts)
            rows.append(_exactly(replace(method_row, metric="difference", unit="1", n=ablations), worst))
        return rows

    def slices(self, loaded: LoadedModel) -> list[list[AblationWork]]:
        """The whole profile, some layers at a time; the unchanged model goes with the last."""
        layers, step = model_shape(loaded.model).layers, self.slice_layers
        work = plan(model_shape(loaded.model), self.batch)
        return [[piece for piece in work if i <= min(piece.layer, layers - 1) < i + step] for i in range(0, layers, step)]

    def time_slice(self, loaded: LoadedModel, windows: Tensor, work: list[AblationWork], rounds: int) -> dict[str, Any]:
        """Seconds of each candidate in each round, and the largest relative difference of a loss from the plain method's."""
        with tempfile.TemporaryDirectory() as scratch:
            folders: dict[str, Path] = {}
            calls = {name: self._call(name, loaded, windows, work, Path(scratch), folders) for name in CANDIDATES}
            timings = interleave(calls, rounds=rounds, warmup=0)
            losses = {name: _losses(folders[name], work) for name in CANDIDATES}
        differences = {
            name: float(((losses[name] - losses["plain"]).abs() / losses["plain"]).max())
            for name in CANDIDATES
            if name != "plain"
        }
        return {"seconds": {name: list(timing.seconds) for name, timing in timings.items()}, "difference": differences}

    def _call(self, name, loaded, windows, work, scratch: Path, folders: dict[str, Path]) -> Callable[[], None]:
        """Each round measures into a new folder: finished units would be skipped."""

        def call() -> None:
            folders[name] = Path(tempfile.mkdtemp(dir=scratch))
            measure_by(name, loaded, windows, Units(folders[name]), work, self.batch)

        return call

    def _windows(self, lab: Lab, count: int) -> Tensor:
        return lab.calibration(tokens=self.window_tokens, windows=count, key="study.window_tokens")

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """Times, memory and differences, and the targets below."""
        cells = rows.set_index(["method", "metric"])
        table = Table(title=f"{title} · importance profile, measured")
        for heading in (
            "method",
            "seconds",
            "times faster",
            "quartiles",
            "peak memory (MiB)",
            "largest relative difference of a loss",
        ):
            table.add_column(heading, justify="left" if heading == "method" else "right")
        for name in CANDIDATES:
            value, faster = cells.value[name], cells.loc[name, "times_faster"]
            spread = "–" if np.isnan(faster.low) else f"{faster.low:.2f}–{faster.high:.2f}"
            memory, difference = f"{value.peak_bytes / 2**20:.0f}", f"{value.difference:.1e}"
            table.add_row(name, f"{value.seconds:.1f}", f"{value.times_faster:.2f}", spread, memory, difference)
        shared, plain = cells.value["shared"], cells.value["plain"]
        targets = {
            f"at least {SPEED_TARGET} times faster": shared.times_faster >= SPEED_TARGET,
            "peak memory no higher": shared.peak_bytes <= plain.peak_bytes,
            f"losses equal to {LOSS_TOLERANCE:g} relative": rows[rows.metric == "difference"].value.max() <= LOSS_TOLERANCE,
        }
        return Group(table, *(f"{'met' if met else 'NOT MET'}: {target}" for target, met in targets.items()))


def measure_by(name: str, loaded: LoadedModel, windows: Tensor, units: Units, work: list[AblationWork], batch: int) -> None:
    """One candidate on some of the work."""
    options = {"ablation": zero, "batch": batch}
    if name == "plain":
        measure_plainly(loaded.model, windows, units, work, **options)
    else:
        linear = "torch" if name == "shared, torch" else "auto"
        measure_exactly(loaded.model, windows, units, work, linear=linear, **options)


def summarise(parts: list[dict[str, Any]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Seconds of the whole profile in each round, and the quotients to plain."""
    totals = {name: np.sum([part["seconds"][name] for part in parts], axis=0) for name in CANDIDATES}
    return {name: (seconds, totals["plain"] / seconds) for name, seconds in totals.items()}


def own_peak_bytes(name: str, model: Mapping[str, Any], windows: Tensor, batch: int) -> int:
    """What this process needs at most beyond the loaded model, on the most demanding layer's ablations and the whole model."""
    loaded = build(model)
    shape = model_shape(loaded.model)
    work = [piece for piece in plan(shape, batch) if piece.layer in (0, shape.layers)]
    with torch.no_grad():  # pages in the weights and whatever a first call allocates for good
        loaded.model(windows[:1, :8], use_cache=False)
    with tempfile.TemporaryDirectory() as scratch:
        return peak_bytes(lambda: measure_by(name, loaded, windows, Units(Path(scratch)), work, batch))


def _losses(folder: Path, work: list[AblationWork]) -> Tensor:
    units = Units(folder)
    return torch.tensor([units.read(key) for piece in work for key in piece.keys], dtype=torch.float64)


def _spread(row: SpreadRow, values: np.ndarray) -> SpreadRow:
    low, median, high = (float(value) for value in np.percentile(values, (25, 50, 75)))
    return replace(row, value=median, low=low, high=high)


def _exactly(row: SpreadRow, value: float) -> SpreadRow:
    return replace(row, value=float(value), low=float(value), high=float(value))
