"""Importance by racing against the plain and the exact method, on the bundled model: time, ranks, and the retentions that follow.

python -m benchmarks.racing          three minutes on two cores
"""

from __future__ import annotations

import argparse
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.interleave import interleave, ratio
from benchmarks.offline import calibration
from benchmarks.rows import save_result
from experiments.provenance import called
from shadowattn.artifacts import Units, content_hash
from shadowattn.models import load_bundled
from shadowattn.offline import Race, allocate, measure_ablations, race_ablations, rank_correlation, summarise
from shadowattn.offline.stability import increases
from shadowattn.types import AblationLosses, Importance

CANDIDATES = ("plain", "exact", "racing")
TIMES_FASTER_BAR, RANK_BAR = 4.0, 0.95
RETENTION = 0.2
UNITS = {
    "seconds": "s",
    "times_faster": "1",
    "window_forwards": "windows",
    "rank_correlation": "1",
    "retention_mean_difference": "1",
    "retention_largest_difference": "1",
}


def allot(importance: Importance) -> list[list[float]]:
    """What the race is for: the default allocator at the default retention."""
    measured = (importance.head_ppl, importance.layer_ppl)
    return allocate(*measured, base_ppl=importance.base_ppl, retention=RETENTION, method="waterfill")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=128, help="calibration windows of 128 tokens")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each candidate")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--results", default="results")
    options = parser.parse_args()
    started = datetime.now(UTC)
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    loaded, found = load_bundled(), {}
    windows = calibration(loaded, options.windows)
    calls = {name: lambda name=name: found.update({name: _measure(name, loaded.model, windows)}) for name in CANDIDATES}
    timings = interleave(calls, rounds=options.rounds, warmup=0)
    exact = summarise(found["exact"])
    result = {}
    for name in CANDIDATES:
        own = summarise(found[name])
        moved = torch.tensor(allot(own)) - torch.tensor(allot(exact))
        result[name] = {
            "seconds": timings[name].median_s,
            "times_faster": ratio(timings["plain"], timings[name]),
            "window_forwards": found[name].window_forwards,
            "rank_correlation": rank_correlation(increases(own), increases(exact)),
            "retention_mean_difference": float(moved.abs().mean()),
            "retention_largest_difference": float(moved.abs().max()),
        }
    settings = {"windows": len(windows), "rounds": options.rounds, "threads": torch.get_num_threads()}
    folder = Path(options.results) / "runs" / "benchmark_racing" / content_hash(settings)
    counts = dict.fromkeys(UNITS, 1) | {"seconds": options.rounds, "times_faster": options.rounds}
    save_result(
        folder, experiment="benchmark_racing", model=loaded.name, settings=settings, result=result, units=UNITS, counts=counts,
        command=called("benchmarks.racing"), started=started,
    )  # fmt: skip
    _print(result)
    print(folder)


def _measure(name: str, model, windows: torch.Tensor) -> AblationLosses:
    with tempfile.TemporaryDirectory() as scratch:
        units = Units(Path(scratch))
        if name == "racing":
            return race_ablations(model, windows, units, allot, race=Race())
        return measure_ablations(model, windows, units, method=name)


def _print(result: dict) -> None:
    table = Table(title=f"importance of the bundled model, measured; retention {RETENTION:g}", title_justify="left")
    table.add_column("method")
    for heading in ("seconds", "times faster", "windows run", "rank correlation", "retention differs by", "at most"):
        table.add_column(heading, justify="right")
    for name, line in result.items():
        cells = [f"{line['seconds']:.1f}", f"{line['times_faster']:.2f}", str(line["window_forwards"])]
        cells += [f"{line['rank_correlation']:.3f}", f"{line['retention_mean_difference']:.4f}"]
        table.add_row(name, *cells, f"{line['retention_largest_difference']:.4f}")
    Console(width=120).print(table)
    racing = result["racing"]
    for bar, met in {
        f"at least {TIMES_FASTER_BAR:g} times faster than plain": racing["times_faster"] >= TIMES_FASTER_BAR,
        f"rank correlation at least {RANK_BAR:g}": racing["rank_correlation"] >= RANK_BAR,
    }.items():
        print(f"{'met' if met else 'NOT MET'}: {bar}")


if __name__ == "__main__":
    main()
