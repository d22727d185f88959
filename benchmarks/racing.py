"""Importance by racing against the exact method: work, ranks and the retentions that follow, over many orders of the windows.

    python -m benchmarks.racing                      bundled model, six minutes on two cores
    python -m benchmarks.racing --model FOLDER       another one
    python -m benchmarks.racing --rounds 0           without timing

All windows are measured once by the exact method; every race, each in an order of its own, is then replayed over these losses
(`offline.replay_race`). The same figures are given for looser settings and for a subset of the windows that costs what the races
cost. Work is counted in forward passes of one window without one unit, the unchanged model's included.
The race's defaults were chosen on orders 0 to 23 and 100 to 123 of the bundled model and stories260K; those measured are others.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.offline import calibration
from benchmarks.rows import save_result
from experiments.provenance import called
from shadowattn.artifacts import Units, content_hash
from shadowattn.interleave import interleave, ratio
from shadowattn.models import LoadedModel, load_bundled, load_local
from shadowattn.offline import (
    Race,
    allocate,
    measure_ablations,
    race_ablations,
    rank_correlation,
    replay_race,
    summarise,
)
from shadowattn.offline.stability import increases
from shadowattn.types import AblationLosses, Importance

TIMED = ("plain", "exact", "racing")
LOOSE = {"first": 16, "z": 1.0, "tolerance": 0.2, "overlap": 0.15}
RANK_TARGET, RETENTION_TARGET, WORK_TARGET = 0.98, 0.03, 1.4
FIRST_ORDER = 200
RETENTION = 0.2

FIGURES = {
    "window_forwards": "windows",
    "times_fewer_forwards": "1",
    "rank_correlation": "1",
    "retention_mean_difference": "1",
    "retention_largest_difference": "1",
}
STATISTICS = {"smallest": np.min, "median": np.median, "largest": np.max}
UNITS = {f"{figure}_{name}": unit for figure, unit in FIGURES.items() for name in STATISTICS}
UNITS |= FIGURES | {"seconds": "s", "times_faster": "1"}


def allot(importance: Importance) -> list[list[float]]:
    """What the race is for: the default allocator at the default retention."""
    measured = (importance.head_ppl, importance.layer_ppl)
    return allocate(*measured, base_ppl=importance.base_ppl, retention=RETENTION, method="waterfill")


def compare(exact: AblationLosses, orders: Sequence[int]) -> dict[int, dict[str, dict[str, float]]]:
    """For each order and method, how much work its importance took and how far it is from that of all windows."""
    profile, compared = summarise(exact), {}
    for order in orders:
        race, loose = (replay_race(exact, allot, race=Race(seed=order, **settings)) for settings in ({}, LOOSE))
        whole = _forwards(exact)
        # So many of the first windows as cost no less than the race.
        subset = Race(seed=order).order(len(exact.base)).tolist()[: -(-_forwards(race) * len(exact.base) // whole)]
        found = {
            "racing": (_forwards(race), summarise(race)),
            "racing, loose": (_forwards(loose), summarise(loose)),
            "exact on fewer windows": (whole * len(subset) // len(exact.base), summarise(exact, windows=subset)),
        }
        compared[order] = {name: _figures(*measured, whole, profile) for name, measured in found.items()}
    return compared


def over_orders(compared: Mapping[int, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Smallest, median and largest of each figure over the orders, by method."""
    methods = next(iter(compared.values()))
    return {
        method: {
            f"{figure}_{name}": float(statistic([by_method[method][figure] for by_method in compared.values()]))
            for figure in FIGURES
            for name, statistic in STATISTICS.items()
        }
        for method in methods
    }


def main() -> None:
    options, started = _options(), datetime.now(UTC)
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    loaded = load_bundled() if options.model == "bundled" else load_local(options.model)
    windows, orders = calibration(loaded, options.windows), range(FIRST_ORDER, FIRST_ORDER + options.orders)
    compared = compare(_measure("exact", loaded, windows), orders)
    result = over_orders(compared)
    if options.rounds:
        for name, timing in _time(loaded, windows, options.rounds).items():
            result[name] = result.get(name, {}) | timing
    settings = {"windows": len(windows), "rounds": options.rounds, "threads": torch.get_num_threads()}
    settings |= {"orders": list(orders), "model": loaded.fingerprint}
    experiment = "benchmark_racing" if options.model == "bundled" else f"benchmark_racing_{loaded.name.lower()}"
    folder = Path(options.results) / "runs" / experiment / content_hash(settings)
    counts = {f"{figure}_{name}": len(orders) for figure in FIGURES for name in STATISTICS}
    counts |= {"seconds": options.rounds, "times_faster": options.rounds}
    save_result(
        folder, experiment=experiment, model=loaded.name, settings=settings, result=result, units=UNITS, by_seed=compared,
        counts=counts, command=called("benchmarks.racing"), started=started,
    )  # fmt: skip
    _print(result, loaded.name, len(orders), len(windows))
    print(folder)


def _time(loaded: LoadedModel, windows: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of the methods, taking turns; the race in its default order."""
    calls = {name: lambda name=name: _measure(name, loaded, windows) for name in TIMED}
    timings = interleave(calls, rounds=rounds, warmup=0)
    return {
        name: {"seconds": timing.median_s, "times_faster": ratio(timings["exact"], timing)} for name, timing in timings.items()
    }


def _measure(name: str, loaded: LoadedModel, windows: torch.Tensor) -> AblationLosses:
    with tempfile.TemporaryDirectory() as scratch:
        units = Units(Path(scratch))
        if name == "racing":
            return race_ablations(loaded.model, windows, units, allot, race=Race())
        return measure_ablations(loaded.model, windows, units, method=name)


def _forwards(losses: AblationLosses) -> int:
    """Forward passes of one window, those of the unchanged model included."""
    return losses.window_forwards + len(losses.base)


def _figures(forwards: int, importance: Importance, whole: int, exact: Importance) -> dict[str, float]:
    moved = np.abs(np.subtract(allot(importance), allot(exact)))
    return {
        "window_forwards": forwards,
        "times_fewer_forwards": whole / forwards,
        "rank_correlation": rank_correlation(increases(importance), increases(exact)),
        "retention_mean_difference": float(moved.mean()),
        "retention_largest_difference": float(moved.max()),
    }


def _print(result: dict[str, dict[str, float]], model: str, orders: int, windows: int) -> None:
    title = f"importance of {model} by {windows} windows in {orders} orders, against exact on all; retention {RETENTION:g}"
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for heading in ("times fewer forwards", "rank correlation", "retention differs by, mean", "at most"):
        table.add_column(f"{heading}\nsmallest / median / largest", justify="right")
    for name, line in result.items():
        if "rank_correlation_median" not in line:
            continue
        cells = []
        for figure, form in zip(list(FIGURES)[1:], (".2f", ".3f", ".4f", ".3f"), strict=True):
            cells.append(" / ".join(f"{line[f'{figure}_{statistic}']:{form}}" for statistic in STATISTICS))
        table.add_row(name, *cells)
    Console(width=150).print(table)
    for name, line in result.items():
        if "seconds" in line:
            print(f"{name}: {line['seconds']:.1f} s, {line['times_faster']:.2f} times faster than exact")
    racing = result["racing"]
    for target, met in {
        f"rank correlation at least {RANK_TARGET:g} in every order": racing["rank_correlation_smallest"] >= RANK_TARGET,
        f"no retention off by more than {RETENTION_TARGET:g} in any order": racing["retention_largest_difference_largest"]
        <= RETENTION_TARGET,
        f"at least {WORK_TARGET:g} times fewer forwards in the median": racing["times_fewer_forwards_median"] >= WORK_TARGET,
    }.items():
        print(f"{'met' if met else 'NOT MET'}: {target}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="bundled, or a model's folder")
    parser.add_argument("--windows", type=int, default=128, help="calibration windows of 128 tokens")
    parser.add_argument("--orders", type=int, default=24, help="orders of the windows")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each candidate in the timing; 0: no timing")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--results", default="results")
    options = parser.parse_args()
    if options.orders < 1 or options.windows < 2:
        parser.error("expected at least one order and two windows")
    return options


if __name__ == "__main__":
    main()
