"""Every graph of ours through Intel's NPU compiler: which compile, and what its cost model predicts. Nothing runs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.lab import Lab
from experiments.progress import say
from experiments.refusals import check_choice, check_count
from experiments.studies.base import Study
from experiments.studies.npu_cases import MODELS, GraphCase, cases
from shadowattn.artifacts import read_json
from shadowattn.errors import InputError
from shadowattn.graphs.npu.compiler import MANIFEST, PLATFORMS, NpuCompiler, compiler_folder
from shadowattn.graphs.npu.log import CompiledGraph
from shadowattn.reporting.figures.npu_compile import draw as draw_npu_compile
from shadowattn.reporting.rows import Row

_PREDICTED = "predicted latency"


@dataclass(frozen=True)
class CompiledRow(Row):
    """One graph on one platform; `value` is the predicted latency, NaN where it does not compile, and `flag` then says why.

    `part`: what the graph is an example of; `method` its form. `heads`, `head_dim`, `group`, `top_k`, `chunk_rows` its shape,
    `context_tokens` its keys, `tiles` of the matrix engine it was given (0: the compiler's own choice) and `dpu_tiles` got.
    `macs`: multiply-accumulates by its shapes; `fp_ops`, `int_ops` as the compiler counts. Tasks of the matrix and vector engines
    and copies; `kernels` of the vector engine; `unpriced`: those whose price the cost model does not know. `peak_share`: of the
    platform's published INT8 peak. `activity`: the compiler's factor for energy. `compile_s` is of the machine below.
    """

    part: str = ""
    platform: str = ""
    heads: int = 0
    chunk_rows: int = 0
    head_dim: int = 0
    group: int = 1
    top_k: int = 0
    tiles: int = 0
    dpu_tiles: float = math.nan
    macs: float = 0.0
    compile_s: float = math.nan
    blob_bytes: float = math.nan
    fp_ops: float = math.nan
    int_ops: float = math.nan
    dpu_tasks: int = 0
    shave_tasks: int = 0
    dma_tasks: int = 0
    kernels: str = ""
    unpriced: str = ""
    dpu_mhz: float = math.nan
    peak_share: float = math.nan
    activity: float = math.nan
    compiler: str = ""


@dataclass(frozen=True)
class NpuCompile(Study):
    """Graphs of `npu_cases` for each of `platforms`, chunks of `rows` rows: banks of `models` on `keys` keys; of the models
    `whole` blocks too, and dense attention on `attention_keys` keys.

    `peak_tops`: published INT8 peaks, 10¹² operations a second, two a multiply-accumulate; none for a platform where none is
    known.
    """

    platforms: list[str] = field(default_factory=lambda: list(PLATFORMS))
    models: list[str] = field(default_factory=lambda: list(MODELS))
    whole: list[str] = field(default_factory=lambda: ["smollm2", "qwen2_0_5b"])
    rows: int = 256
    keys: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096, 8192])
    attention_keys: list[int] = field(default_factory=lambda: [256, 1024, 2048, 4096, 8192])
    launch_heads: list[int] = field(default_factory=lambda: [1, 2, 4])
    peak_tops: dict[str, float] = field(default_factory=dict)
    headline: ClassVar[tuple[str, ...]] = (_PREDICTED,)

    def __post_init__(self):
        for name, options in (("platforms", PLATFORMS), ("models", MODELS), ("whole", MODELS)):
            if not getattr(self, name):
                raise InputError(f"study.{name}: expected at least one of {', '.join(options)}, got none")
            for one in getattr(self, name):
                check_choice(f"study.{name}", one, tuple(options))
        for name in ("keys", "attention_keys", "launch_heads"):
            if not getattr(self, name):
                raise InputError(f"study.{name}: expected at least one number, got none")
            check_count(f"study.{name}", min(getattr(self, name)))
        check_count("study.rows", self.rows)
        for platform, peak in self.peak_tops.items():
            check_choice("study.peak_tops", str(platform), tuple(PLATFORMS))
            if not peak > 0:
                raise InputError(f"study.peak_tops: expected more than 0 operations a second of NPU {platform}, got {peak}")

    def check(self, lab: Lab) -> None:
        NpuCompiler()

    def inputs(self) -> dict[str, Any]:
        """The compiler that is set up here; nothing where there is none, and then `check` refuses."""
        path = compiler_folder() / MANIFEST
        return {"npu_compiler": read_json(path, "make npu-compile") if path.is_file() else None}

    def measure(self, lab: Lab) -> list[CompiledRow]:
        units, every = lab.units("graphs"), list(self._cases())
        say(f"npu compiler: {len(every)} graphs for {', '.join(self.platforms)}; interrupted, the same command goes on")
        row = replace(
            lab.row(CompiledRow), metric=_PREDICTED, unit="us", path_kind="timing", measured="compiled", n=1, data="none"
        )
        cells = {_key(case, platform): (case, platform) for case in every for platform in self.platforms}
        with NpuCompiler() as compiler:
            lab.measure_pieces(units, {key: partial(_compiled, compiler, *cell) for key, cell in cells.items()}, "compile")
        return [self._row(row, *cell, units.read(key)) for key, cell in cells.items()]

    def _cases(self):
        yield from cases(
            rows=self.rows, keys=self.keys, launch_heads=self.launch_heads, models=self.models, whole=self.whole,
            attention_keys=self.attention_keys,
        )  # fmt: skip

    def _row(self, row: CompiledRow, case: GraphCase, platform: str, record: Mapping[str, Any]) -> CompiledRow:
        version = record["compiler"]
        made = CompiledGraph(**{name: value for name, value in record.items() if name != "compiler"})
        tasks, peak = made.tasks or {}, self.peak_tops.get(platform, math.nan)
        return replace(
            row, part=case.part, model=case.model, method=case.name, platform=platform, estimate_device=f"NPU {platform}",
            value=made.predicted_us, flag=made.error, context_tokens=case.shape.keys, heads=case.shape.heads,
            chunk_rows=case.shape.rows, head_dim=case.shape.head_dim, group=case.shape.group, top_k=case.shape.top_k,
            tiles=case.tiles, dpu_tiles=made.dpu_groups, macs=case.macs, compile_s=made.compile_s, blob_bytes=made.blob_bytes,
            fp_ops=made.fp_ops, int_ops=made.int_ops, dpu_tasks=tasks.get("dpu", 0), shave_tasks=tasks.get("shave", 0),
            dma_tasks=tasks.get("dma", 0), kernels=", ".join(f"{name} {n}" for name, n in (made.kernels or {}).items()),
            unpriced=", ".join(made.unpriced), dpu_mhz=made.dpu_mhz, activity=made.activity, compiler=version,
            peak_share=2e-6 * case.macs / (made.predicted_us * peak),
        )  # fmt: skip

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"npu_compile": draw_npu_compile(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """Forms and layouts by platform: predicted µs and share of the INT8 peak; and of every part how many graphs compile."""
        platforms = list(dict.fromkeys(rows.platform))
        counts = Table("graphs that compile", *platforms, title=f"{title} · compiled, not run", title_justify="left")
        for part, cell in rows.groupby("part", sort=False):
            done = [cell[cell.platform == platform].value.notna() for platform in platforms]
            counts.add_row(part, *(f"{one.sum()} of {len(one)}" for one in done))
        forms = Table(
            "predicted µs, share of the INT8 peak", *platforms, title_justify="left",
            caption="* not all operations are priced", caption_justify="left",
        )  # fmt: skip
        for (part, name), cell in rows[rows.part.isin(("form", "layout"))].groupby(["part", "method"], sort=False):
            by = cell.set_index("platform")
            forms.add_row(f"{part}: {name}", *(_shown(by.loc[platform]) for platform in platforms))
        failed = rows[rows.value.isna()]
        reasons = [f"{len(cell)} graphs: {reason}" for reason, cell in failed.groupby("flag")]
        return Group(counts, forms, *reasons)


def _key(case: GraphCase, platform: str) -> str:
    return f"{platform} {case.part} {case.model} {case.name} {case.tiles} {asdict(case.shape)}"


def _compiled(compiler: NpuCompiler, case: GraphCase, platform: str) -> dict[str, Any]:
    outcome = compiler.compile(case.build(), platform, tiles=case.tiles)
    return asdict(outcome) | {"compiler": compiler.version}


def _shown(row: pd.Series) -> str:
    if math.isnan(row.value):
        return f"fails: {row.flag[:40]}"
    share = "" if math.isnan(row.peak_share) else f", {row.peak_share:.0%}"
    return f"{row.value:.1f}{share}{' *' if row.unpriced else ''}"
