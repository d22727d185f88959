"""Sparse attention against the best dense attention there is, side by side: `python -m benchmarks.attention`.

    python -m benchmarks.attention                  everything, about fifteen minutes on two quiet cores
    python -m benchmarks.attention --only bars      the bars alone, two minutes
    python -m benchmarks.attention --only keys --shape qwen2-1.5b --dtype bfloat16

Parts: bars (8192 keys, chunk of 512, retention 0.2), keys (against the number of keys), retention (against retention, with the
break-even), decode, flex (torch's flex_attention on the same blocks; compiles for minutes), memory (peak, at 32k keys).
Candidates take turns in one process; times are medians with quartiles, ratios medians of the rounds' ratios. Tensors are random:
this measures speed, not quality. A total is the whole path with one estimator, named in its row: `int8`, OpenVINO's graphs and
the default, or `int8_fused`. As in experiments, GOMP_SPINCOUNT=0 keeps libgomp's threads from spinning on the cores that
OpenVINO's need. Rows go to results/benchmarks/attention.csv, figures beside it; a part replaces its own rows.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # read once, when torch is imported

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks import candidates, memory
from benchmarks.attention_bars import bars_table
from benchmarks.attention_figures import draw
from benchmarks.candidates import SHAPES, Case, Tensors
from experiments.provenance import called, joined, origin, write_csv
from shadowattn.artifacts import content_hash
from shadowattn.errors import InputError
from shadowattn.interleave import Timing, interleave, ratio
from shadowattn.kernels import native
from shadowattn.machine import processor
from shadowattn.models.linear import has_onednn, onednn
from shadowattn.online.selection import BLOCK_SCORES

PARTS = ("bars", "keys", "retention", "decode", "flex", "memory")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BAR_KEYS, BAR_ROWS, BAR_RETENTION = 8192, 512, 0.2
KEYS = (1024, 2048, 4096, 8192, 16384, 32768)
RETENTIONS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
OUT = Path("results/benchmarks/attention.csv")


@dataclass(frozen=True)
class BenchmarkRow:
    """One way to attend (`method`) on one case; the columns of every row of the project, and the case's.

    `value` is a median over `n` rounds, `low` and `high` are its quartiles (of times; else the value). `model` names whose
    layer has such a shape.
    """

    experiment: str
    config_hash: str
    part: str
    method: str
    metric: str
    value: float
    unit: str
    low: float
    high: float
    model: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    keys: int
    rows: int
    retention: float
    n: int
    seed: int
    path_kind: str
    estimate_device: str
    measured: str
    kernel: str
    processor: str
    threads: int
    versions: str


def row(part: str, case: Case, method: str, metric: str, value: float, unit: str, timing: Timing | None = None) -> BenchmarkRow:
    """A row with all that is common to the case and the machine."""
    low, high = timing.quartiles_s if timing else (value, value)
    scale = 1e3 if timing and unit == "ms" else 1.0
    heads, kv_heads, dim = SHAPES[case.shape]
    settings = asdict(case) | {"dtype": str(case.dtype).removeprefix("torch."), "part": part}
    return BenchmarkRow(
        experiment="benchmark_attention",
        config_hash=content_hash(settings),
        part=part,
        method=method,
        metric=metric,
        value=value,
        unit=unit,
        low=low * scale,
        high=high * scale,
        model=case.shape,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=settings["dtype"],
        keys=case.keys,
        rows=case.rows,
        retention=case.retention,
        n=len(timing.seconds) if timing else 1,
        seed=0,
        path_kind="timing",
        estimate_device="none",
        measured="measured",
        kernel=f"native:{native.LEVELS[native.level()]}",
        processor=_processor(),
        threads=torch.get_num_threads(),
        versions=f"torch {torch.__version__}",
    )


@cache
def _processor() -> str:
    return processor()


def timed_rows(part: str, case: Case, timings: dict[str, Timing]) -> Iterator[BenchmarkRow]:
    """Time of each candidate, and how many times faster than each dense baseline it is."""
    for name, timing in timings.items():
        yield row(part, case, name, "time", timing.median_s * 1e3, "ms", timing)
        for baseline in ("sdpa", "own dense"):
            if baseline in timings:
                yield row(part, case, name, f"times faster than {baseline}", ratio(timings[baseline], timing), "1")


def bars(shapes: list[str], dtypes: list[str], rounds: int) -> Iterator[BenchmarkRow]:
    for case in _cases(shapes, dtypes, [BAR_KEYS], [BAR_RETENTION]):
        t = Tensors(case)
        calls = candidates.baselines(t) | candidates.attend_only(t) | candidates.stages(t) | candidates.totals(t, 1)
        for block_score in BLOCK_SCORES:
            calls |= candidates.totals(t, 32, block_score)
        timings = interleave(calls, rounds=rounds, warmup=2)
        yield from timed_rows("bars", case, timings)
        select = Timing(
            tuple(a - b for a, b in zip(timings["estimate + select"].seconds, timings["estimate"].seconds, strict=True))
        )
        yield row("bars", case, "select", "time", select.median_s * 1e3, "ms", select)
        yield row("bars", case, "select", "share of sdpa", 1 / ratio(timings["sdpa"], select), "1")
    for case in _cases(shapes[:1], dtypes[:1], [BAR_KEYS], [BAR_RETENTION]):
        yield from machine_limits(case, rounds)
    # What a user would write without kernels of his own; too slow for long prompts.
    for case in _cases(shapes[:1], dtypes, [2048], [BAR_RETENTION], rows=256):
        t = Tensors(case)
        calls = candidates.baselines(t) | candidates.attend_only(t) | candidates.gather(t, 1) | candidates.gather(t, 32)
        yield from timed_rows("gather", case, interleave(calls, rounds=3))


def machine_limits(case: Case, rounds: int) -> Iterator[BenchmarkRow]:
    """The roofs: torch's matrix products, and the sum of an array that fits no cache."""
    a, b = torch.randn(2, 2048, 2048)
    big = torch.ones(64 << 20)
    half = (a.bfloat16(), b.bfloat16())
    # By oneDNN where torch has it: its float32 products by MKL reach half of that on some processors.
    timings = interleave(
        {
            "bandwidth": lambda: big.sum(),
            "float32": lambda: onednn(a, b, None) if has_onednn() else a @ b,
            "bfloat16": lambda: half[0] @ half[1],
        },
        rounds=rounds,
    )
    yield row("bars", case, "machine", "bandwidth", big.numel() * 4 / timings["bandwidth"].median_s / 1e9, "GB/s")
    for dtype in DTYPES:
        yield row("bars", case, "machine", f"peak {dtype}", 2 * 2048**3 / timings[dtype].median_s / 1e9, "GFLOP/s")


def keys(shapes: list[str], dtypes: list[str], rounds: int) -> Iterator[BenchmarkRow]:
    for case in _cases(shapes, dtypes, KEYS, [BAR_RETENTION]):
        t = Tensors(case)
        calls = candidates.baselines(t) | candidates.attend_only(t) | candidates.totals(t, 1) | candidates.totals(t, 32)
        yield from timed_rows("keys", case, interleave(calls, rounds=max(3, rounds * BAR_KEYS // max(case.keys, BAR_KEYS))))


def retention(shapes: list[str], dtypes: list[str], rounds: int) -> Iterator[BenchmarkRow]:
    for case in _cases(shapes, dtypes, [BAR_KEYS], RETENTIONS):
        t = Tensors(case)
        calls = candidates.baselines(t) | candidates.attend_only(t) | candidates.totals(t, 1) | candidates.totals(t, 32)
        yield from timed_rows("retention", case, interleave(calls, rounds=max(3, rounds // 2)))


def decode(shapes: list[str], dtypes: list[str], rounds: int) -> Iterator[BenchmarkRow]:
    for case in _cases(shapes, dtypes, [4096, BAR_KEYS, 32768], [BAR_RETENTION], rows=1):
        yield from timed_rows("decode", case, interleave(candidates.decode(Tensors(case)), rounds=4 * rounds, warmup=3))


def flex(shapes: list[str], dtypes: list[str], rounds: int) -> Iterator[BenchmarkRow]:
    for case in _cases(shapes, dtypes, [BAR_KEYS], [BAR_RETENTION]):
        t = Tensors(case)
        calls = candidates.baselines(t) | candidates.flex(t)
        yield from timed_rows("flex", case, interleave(calls, rounds=rounds, warmup=2))


def peak_memory(shapes: list[str], dtypes: list[str], rounds: int) -> Iterator[BenchmarkRow]:
    for case in _cases(shapes, dtypes, [32768], [BAR_RETENTION]):
        for name in memory.CANDIDATES:
            dtype = str(case.dtype).removeprefix("torch.")
            peak = memory.peak_bytes(name, case.shape, dtype, case.keys, case.rows, case.retention)
            yield row("memory", case, name, "peak beyond q, k, v and output", peak / 1e6, "MB")


MEASURE = {"bars": bars, "keys": keys, "retention": retention, "decode": decode, "flex": flex, "memory": peak_memory}


def _cases(shapes, dtypes, keys, retentions, rows: int = BAR_ROWS) -> Iterator[Case]:
    """Every combination, with a progress bar."""
    cases = [Case(s, DTYPES[d], n, min(rows, n), r) for s in shapes for d in dtypes for n in keys for r in retentions]
    for case in (bar := tqdm(cases, disable=not sys.stderr.isatty(), leave=False)):
        bar.set_description(f"{case.shape} {str(case.dtype)[6:]} {case.keys} keys, retention {case.retention:g}")
        yield case


def table(rows: pd.DataFrame, part: str) -> Table:
    """Times with quartiles, and ratios to both baselines."""
    title = f"{part} · {rows.processor.iloc[0]}, {rows.threads.iloc[0]} threads, {rows.kernel.iloc[0]} · measured"
    made = Table("case", "candidate", "value", "quartiles", "× sdpa", "× own dense", title=title)
    for (shape, dtype, keys, kept), cell in rows.groupby(["model", "dtype", "keys", "retention"], sort=False):
        case = f"{shape} {dtype} {keys} keys, {kept:g}"
        for name, values in cell.groupby("method", sort=False):
            by_metric = values.set_index("metric")
            main = by_metric.iloc[0]
            ratios = [
                f"{by_metric.value[m]:.2f}" if (m := f"times faster than {baseline}") in by_metric.index else ""
                for baseline in ("sdpa", "own dense")
            ]
            share = f"  ({by_metric.value['share of sdpa']:.1%} of sdpa)" if "share of sdpa" in by_metric.index else ""
            spread = f"{main.low:.2f} … {main.high:.2f}" if main.unit == "ms" else ""
            made.add_row(case, str(name), f"{main.value:.2f} {main.unit}{share}", spread, *ratios)
            case = ""
        made.add_section()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=OUT, help="rows as CSV; figures go beside them")
    options = parser.parse_args()
    if min(options.rounds, options.threads) < 1:
        parser.error(f"expected at least one round and one thread, got {options.rounds} and {options.threads}")
    try:
        native.require()
    except InputError as error:
        parser.exit(2, f"error: {error}\n")
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 130)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    began, command = datetime.now(UTC), called("benchmarks.attention")
    try:
        joined(options.out, origin(command, content_hash(settings), began))  # refused now, not after the work
    except InputError as error:
        parser.exit(2, f"error: {error}\n")
    for part in options.only:
        made = list(MEASURE[part](options.shape, options.dtype, options.rounds))
        source = joined(options.out, origin(command, content_hash(settings), began))
        rows = _merge(pd.DataFrame([asdict(one) for one in made]), options.out)
        write_csv(rows, options.out, source)
        for name in dict.fromkeys(one.part for one in made):
            console.print(table(rows[rows.part == name], name))
        if part in ("bars", "memory"):
            console.print(bars_table(rows))
    for path in draw(rows, options.out.parent):
        print(path)


def _merge(rows: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Rows of this run in place of earlier ones of the same cases."""
    case = ["part", "model", "dtype", "keys", "rows", "retention"]
    if path.is_file():
        earlier = pd.read_csv(path, dtype={"config_hash": str})
        again = earlier.set_index(case).index.isin(rows.set_index(case).index)
        rows = pd.concat([earlier[~again], rows], ignore_index=True)
    return rows


if __name__ == "__main__":
    main()
