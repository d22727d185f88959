"""Time to the first token with decoder blocks on an NPU, simulated from compiled graphs and measured rates of a processor."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from experiments.lab import Lab
from experiments.progress import say
from experiments.provenance import sidecar
from experiments.publish import ROOT, read_reference
from experiments.refusals import check_choice, check_count
from experiments.studies.base import Study
from experiments.studies.npu_cases import BLOCK_FORMS, MODELS
from shadowattn.artifacts import read_json, sha256
from shadowattn.errors import InputError
from shadowattn.graphs.npu.compiler import PLATFORMS
from shadowattn.models.known import KNOWN_MODELS
from shadowattn.online.simulation.description import save_device
from shadowattn.online.simulation.device import ChunkShape, Device, Layer
from shadowattn.online.simulation.methods import ahead, ours, prompt_cost
from shadowattn.online.simulation.npu import ESTIMATE, Line, npu_device, processor_line, with_launch
from shadowattn.reporting.figures.npu_ttft import draw as draw_npu_ttft
from shadowattn.reporting.rows import Row

OURS, NPU_FULL, CPU_DENSE = "blocks on the NPU, ours", "all on the NPU", "blocks on the NPU, dense attention on the CPU"
ONE_TASK = "blocks on the NPU, ours on the CPU alone"
AHEAD = "blocks on the NPU, ours, estimates a layer ahead"
_RATES_OF = "smollm2"  # whose layer the processor's rates were measured on
_BLOCK_LAUNCHES = 2  # before and behind attention


@dataclass(frozen=True)
class NpuTtftRow(Row):
    """A prompt of `context_tokens` tokens on `platform` with `launch_us` added to each launch; `blocks` the form of the blocks.

    `npu_share`, `cpu_share`: of the time, in which the NPU and the processor work.
    """

    platform: str = ""
    device: str = ""
    blocks: str = ""
    launch_us: float = 0.0
    npu_share: float = math.nan
    cpu_share: float = math.nan


@dataclass(frozen=True)
class NpuTtft(Study):
    """`models` on each of `platforms`, prompts of `tokens` tokens in chunks of `rows`, blocks of each form of `blocks`.

    `compiled`, `rates`: names of published rows, of `+exp=npu_compile` and of `+exp=roofline` with `model=smollm2_q4`.
    `launch_us`: what a launch is assumed to cost beside what the compiler predicts, the range that nobody of us could measure.
    """

    platforms: list[str] = field(default_factory=lambda: list(PLATFORMS))
    models: list[str] = field(default_factory=lambda: ["smollm2", "qwen2_0_5b"])
    tokens: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
    blocks: list[str] = field(default_factory=lambda: ["w8a8", "float16"])
    rows: int = 256
    launch_us: list[float] = field(default_factory=lambda: [0.0, 50.0, 200.0, 1000.0])
    compiled: str = "npu_compile"
    rates: str = "roofline"
    needs: ClassVar[tuple[str, ...]] = ("retention",)
    headline: ClassVar[tuple[str, ...]] = ("time_to_first_token",)

    def __post_init__(self):
        for name in ("platforms", "models", "blocks", "tokens", "launch_us"):
            if not getattr(self, name):
                raise InputError(f"study.{name}: expected at least one, got none")
        check_count("study.rows", self.rows)
        for launch_us in self.launch_us:
            if not 0 <= launch_us < math.inf:
                raise InputError(f"study.launch_us: expected microseconds from 0 on, got {launch_us}")
        for name, options in (("platforms", PLATFORMS), ("models", MODELS), ("blocks", BLOCK_FORMS)):
            for one in getattr(self, name):
                check_choice(f"study.{name}", one, tuple(options))
        check_count("study.tokens", min(self.tokens, default=0), least=self.rows)
        for model in self.models:
            if KNOWN_MODELS[model].shape.head_dim != 64:
                raise InputError(f"study.models: the rates are of head dimension 64, got {model}; choose smollm2 or qwen2_0_5b")

    def inputs(self) -> dict[str, Any]:
        """Both rows by their content."""
        return {name: sha256(path) if (path := _path(name)).is_file() else None for name in (self.compiled, self.rates)}

    def check(self, lab: Lab) -> None:
        for name in (self.compiled, self.rates):
            if not _path(name).is_file():
                raise InputError(f"study: expected published rows {_path(name)}, found none; publish a run of +exp={name} first")
        rates, asked = read_reference(_path(self.rates)), lab.of("retention")
        compiled = read_reference(_path(self.compiled))
        for name, rows, columns, of in (
            ("compiled", compiled, {"platform", "part"}, "npu_compile"), ("rates", rates, {"stage", "phase"}, "roofline"),
        ):  # fmt: skip
            if not columns <= set(rows.columns):
                raise InputError(f"study.{name}: expected published rows of +exp={of}, and {getattr(self, name)} has others")
        if asked not in (of := set(rates.retention[rates.stage == "one task"])):
            known = ", ".join(map(str, of)) or "no retention"
            raise InputError(
                f"retention: the rates of one task are of {known}, got {asked}; measure them with +exp=roofline model=smollm2_q4 "
                f"retention={asked}, publish them, and set study.rates to their name"
            )
        compiled = compiled[(compiled.chunk_rows == self.rows) & compiled.platform.isin(self.platforms)]
        for model in self.models:
            of = compiled[compiled.model == model]
            forms, keys = set(of.method[of.part == "block before"]), of.context_tokens[of.part == "attention"]
            if not forms.issuperset(self.blocks):
                self._refuse(f"blocks {', '.join(sorted({*self.blocks} - forms))}", model)
            if keys.max() < max(self.tokens):
                self._refuse(f"attention to {max(self.tokens)} keys", model)

    def _refuse(self, what: str, model: str) -> NoReturn:
        raise InputError(
            f"study: {_path(self.compiled)} has no {what} of {model} in chunks of {self.rows} rows; compile them with "
            f"+exp=npu_compile study.rows={self.rows} study.whole=[{model}] study.attention_keys=[…,{max(self.tokens)}]"
        )

    def measure(self, lab: Lab) -> list[NpuTtftRow]:
        compiled, rates = (read_reference(_path(name)) for name in (self.compiled, self.rates))
        machine = read_json(sidecar(_path(self.rates)), "publish it again")["machine"]
        processor = f"{machine['cores']} cores of {machine['processor'].split(' (')[0]}"
        say(f"npu: simulated from compiled graphs and rates of {processor}; launches cost {self.launch_us} µs beside")
        layer, rows = _layer(_RATES_OF), []
        one_task = processor_line(rates, layer, "one task")
        row = replace(
            lab.row(NpuTtftRow),
            metric="time_to_first_token",
            unit="s",
            path_kind="timing",
            measured="simulated",
            n=1,
            flag=ESTIMATE,
        )
        for platform in self.platforms:
            device = npu_device(platform, compiled, rates, layer, processor)
            save_device(device, lab.folder / f"intel_npu_{platform}.yaml")
            about = replace(row, platform=platform, device=device.name, estimate_device=f"NPU {platform}")
            for model in self.models:
                of = compiled[(compiled.platform == platform) & (compiled.model == model) & (compiled.chunk_rows == self.rows)]
                for blocks in self.blocks:
                    rows += self._rows(replace(about, model=model, blocks=blocks), device, one_task, of, lab.of("retention"))
        return rows

    def _rows(self, row: NpuTtftRow, device: Device, one_task: Line, graphs: pd.DataFrame, retention: float) -> list[NpuTtftRow]:
        known, layer = KNOWN_MODELS[row.model].shape, _layer(row.model)
        parts = graphs[graphs.part.isin(("block before", "block behind")) & (graphs.method == row.blocks)]
        attention = graphs[(graphs.part == "attention") & (graphs.method == "float16")]
        if len(parts) != _BLOCK_LAUNCHES or parts.value.isna().any() or attention.value.isna().any():
            return []  # what does not compile has no time; the rows of npu_compile say why
        block_us, projection_us = float(parts.value.sum()), float(parts.value[parts.part == "block before"].iloc[0])
        attention = attention.sort_values("macs")
        points = attention.macs.to_numpy(float), attention.value.to_numpy(float)
        made = []
        for tokens in self.tokens:
            chunks = [
                ChunkShape(min(self.rows, tokens - start), min(start + self.rows, tokens))
                for start in range(0, tokens, self.rows)
            ]
            for launch_us in self.launch_us:
                slower = with_launch(device, launch_us)
                times = len(chunks) * known.layers
                block_s = 1e-6 * times * (block_us + _BLOCK_LAUNCHES * launch_us)
                macs = 2.0 * known.heads * self.rows * known.head_dim
                npu_s = 1e-6 * known.layers * sum(np.interp(macs * one.keys, *points) + launch_us for one in chunks)
                cost = prompt_cost(slower, layer, ours, tokens=tokens, chunk_tokens=self.rows, retention=retention)
                dense_s = 1e-6 * known.layers * layer.heads * sum(slower.head_dense_us(layer, one) for one in chunks)
                task_s = 1e-6 * known.layers * layer.heads * sum(one_task.us(one.pairs * layer.head_dim) for one in chunks)
                # Beside a layer's attention the next layer's input is projected to Q, K and V a second time, and estimated.
                early = partial(ahead, before_us=projection_us + launch_us)
                beside = prompt_cost(slower, layer, early, tokens=tokens, chunk_tokens=self.rows, retention=retention)
                early_us = [a + (known.layers - 1) * b for a, b in zip(vars(cost).values(), vars(beside).values(), strict=True)]
                about = replace(row, context_tokens=tokens, launch_us=launch_us)
                made += [
                    _row(about, OURS, block_s, 1e-6 * known.layers * cost.total_us, 1e-6 * known.layers * cost.estimate_us,
                         1e-6 * known.layers * cost.core_us, retention),
                    _row(about, NPU_FULL, block_s, npu_s, npu_s, 0.0, 1.0),
                    _row(about, CPU_DENSE, block_s, dense_s, 0.0, dense_s, 1.0),
                    _row(about, ONE_TASK, block_s, task_s, 0.0, task_s, retention),
                    _row(about, AHEAD, block_s, *(1e-6 * us for us in early_us), retention),
                ]  # fmt: skip
        return made

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"npu_ttft": draw_npu_ttft(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """Seconds to the first token over the range of launch costs."""
        table = Table("platform", "model", "blocks", "tokens", *dict.fromkeys(rows.method), title=f"{title} · simulated, s")
        for at, cell in rows.groupby(["platform", "model", "blocks", "context_tokens"], sort=False):
            by = cell.groupby("method", sort=False).value
            table.add_row(*map(str, at), *(f"{one.min():.2f} … {one.max():.2f}" for _, one in by))
        return table


def _row(
    row: NpuTtftRow, method: str, block_s: float, attention_s: float, npu_s: float, cpu_s: float, retention: float
) -> NpuTtftRow:
    """`attention_s`: of all layers, in which the NPU works `npu_s` and the processor `cpu_s`."""
    total = block_s + attention_s
    return replace(
        row, method=method, value=total, npu_share=(block_s + npu_s) / total, cpu_share=cpu_s / total, retention=retention
    )


def _layer(model: str) -> Layer:
    known = KNOWN_MODELS[model].shape
    return Layer(known.heads, known.kv_heads, known.head_dim)


def _path(name: str) -> Path:
    return ROOT / "results" / "reference" / f"{name}.csv"
