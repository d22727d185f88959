"""The whole importance profile: the plain method, one full forward pass for each ablation, against the one that shares work.

    python -m benchmarks.offline                         bundled model, a minute and a half on two cores
    python -m benchmarks.offline --model qwen2_0_5b      random weights of Qwen2-0.5B's shape, ten minutes; resumes

`plain` runs the model as transformers does. `exact, torch` shares what ablations have in common; `exact` also runs float32 linear
layers by oneDNN: what a user gets. Time: the candidates take turns, slice of layers by slice of layers. Memory: each in a process
of its own, peak over what the loaded model holds, with `batch` windows. Losses are compared window by window.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.rows import save_result
from experiments.provenance import called
from experiments.source import source_hash
from shadowattn.artifacts import Units, content_hash
from shadowattn.data.text import stdlib_corpus, token_windows
from shadowattn.interleave import interleave
from shadowattn.models import LoadedModel, load_bundled, load_random, model_shape
from shadowattn.offline.ablations import zero
from shadowattn.offline.shared_ablations import measure_exactly, measure_plainly
from shadowattn.offline.work import AblationWork, plan

CANDIDATES = ("plain", "exact, torch", "exact")
BAR = 1.8
LOSS_TOLERANCE = 1e-5
UNITS = {"seconds": "s", "times_faster": "1", "peak_bytes": "bytes", "difference": "1"}


def measure(name: str, loaded: LoadedModel, windows: Tensor, units: Units, work: list[AblationWork], batch: int) -> None:
    """One candidate on some of the work."""
    options = {"ablation": zero, "batch": batch}
    if name == "plain":
        measure_plainly(loaded.model, windows, units, work, **options)
    else:
        linear = "torch" if name == "exact, torch" else "auto"
        measure_exactly(loaded.model, windows, units, work, linear=linear, **options)


def load(model: str) -> LoadedModel:
    return load_bundled() if model == "bundled" else load_random(model)


def calibration(loaded: LoadedModel, count: int) -> Tensor:
    text = stdlib_corpus().calibration
    return token_windows(text, loaded.tokenizer, tokens=128, windows=count, source="stdlib")


def slices(loaded: LoadedModel, batch: int, layers: int) -> list[list[AblationWork]]:
    """The whole profile, `layers` layers at a time; the unchanged model goes with the last."""
    work = plan(model_shape(loaded.model), batch)
    last = model_shape(loaded.model).layers
    return [[piece for piece in work if first <= min(piece.layer, last - 1) < first + layers] for first in range(0, last, layers)]


def time_slice(loaded: LoadedModel, windows: Tensor, work: list[AblationWork], batch: int, rounds: int) -> dict:
    """Seconds of each candidate in each round, and the largest relative difference of a loss from the plain method's."""
    with tempfile.TemporaryDirectory() as scratch:
        calls, folders = {}, {}
        for name in CANDIDATES:
            calls[name] = _fresh_call(name, loaded, windows, work, batch, Path(scratch), folders)
        timings = interleave(calls, rounds=rounds, warmup=0)
        losses = {name: _losses(folders[name], work) for name in CANDIDATES}
    differences = {
        name: float(((losses[name] - losses["plain"]).abs() / losses["plain"]).max()) for name in CANDIDATES if name != "plain"
    }
    return {"seconds": {name: list(timing.seconds) for name, timing in timings.items()}, "difference": differences}


def peak_bytes(name: str, model: str, batch: int) -> int:
    """Peak resident memory beyond the loaded model's, in a fresh process, over the most demanding layer's ablations."""
    command = [sys.executable, "-m", "benchmarks.offline", "--memory", name, "--model", model, "--batch", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    started = datetime.now(UTC)
    options = _options()
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    if options.memory:
        print(_own_peak_bytes(options.memory, options.model, options.batch))
        return
    loaded = load(options.model)
    windows = calibration(loaded, options.windows)
    bundled = options.model == "bundled"
    parts = slices(loaded, options.batch, options.slice_layers or (8 if bundled else 4))
    settings = {"windows": options.windows, "batch": options.batch, "rounds": options.rounds, "model": loaded.fingerprint}
    settings |= {"threads": torch.get_num_threads(), "parts": len(parts)}
    folder = Path(options.results) / "runs" / "benchmark_offline" / content_hash(settings)
    units = Units(folder / f"slices-{source_hash()}")  # those of other code count for nothing
    print(f"{loaded.name}: {sum(len(p.keys) for part in parts for p in part)} ablations of {len(windows)} × 128 tokens, float32")
    warm = [piece for piece in parts[-1] if piece.layer == model_shape(loaded.model).layers]
    time_slice(loaded, windows, warm, options.batch, 1)
    for index, part in enumerate(parts):
        if not units.has(str(index)) and (options.slices is None or index in options.slices):
            units.put(str(index), time_slice(loaded, windows, part, options.batch, options.rounds))
            print(f"slice {index + 1} of {len(parts)} done", file=sys.stderr)
    if not all(units.has(str(index)) for index in range(len(parts))):
        print("more slices to do; the same command goes on")
        return
    memory = {
        name: units.get(f"memory-{name}", lambda name=name: peak_bytes(name, options.model, options.batch)) for name in CANDIDATES
    }
    result = summarise([units.read(str(index)) for index in range(len(parts))], memory)
    experiment = f"benchmark_offline_{options.model}"
    counts = {"seconds": options.rounds, "times_faster": options.rounds, "peak_bytes": 1}
    counts["difference"] = sum(len(piece.keys) for part in parts for piece in part)  # the largest of so many ablations
    save_result(
        folder, experiment=experiment, model=loaded.name, settings=settings, result=result, units=UNITS, counts=counts,
        command=called("benchmarks.offline"), started=started,
    )  # fmt: skip
    _print(result, loaded.name)
    print(folder)


def summarise(parts: list[dict], memory: dict[str, int]) -> dict[str, dict[str, float]]:
    """Seconds for the whole profile, the median over rounds of the quotient to plain, its quartiles, memory, difference."""
    totals = {name: torch.tensor([part["seconds"][name] for part in parts]).sum(0) for name in CANDIDATES}
    result = {}
    for name, seconds in totals.items():
        quotients = totals["plain"] / seconds
        low, high = torch.quantile(quotients, torch.tensor([0.25, 0.75])).tolist()
        result[name] = {
            "seconds": float(seconds.median()),
            "times_faster": float(quotients.median()),
            "quartiles": [low, high],
            "peak_bytes": memory[name],
            "difference": max((part["difference"].get(name, 0.0) for part in parts), default=0.0),
        }
    return result


def _fresh_call(name, loaded, windows, work, batch, scratch: Path, folders: dict) -> Callable[[], None]:
    """Each round measures into a new folder: finished units would be skipped."""

    def call() -> None:
        folders[name] = Path(tempfile.mkdtemp(dir=scratch))
        measure(name, loaded, windows, Units(folders[name]), work, batch)

    return call


def _losses(folder: Path, work: list[AblationWork]) -> Tensor:
    units = Units(folder)
    return torch.tensor([units.read(key) for piece in work for key in piece.keys], dtype=torch.float64)


def _own_peak_bytes(name: str, model: str, batch: int) -> int:
    """What this process needs at most beyond the loaded model, on layer 0 and the unchanged model."""
    loaded = load(model)
    windows = calibration(loaded, batch)
    work = [piece for piece in plan(model_shape(loaded.model), batch) if piece.layer in (0, model_shape(loaded.model).layers)]
    with torch.no_grad():  # pages in the weights and whatever a first call allocates for good
        loaded.model(windows[:1, :8], use_cache=False)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_bytes("VmRSS")
    with tempfile.TemporaryDirectory() as scratch:
        measure(name, loaded, windows, Units(Path(scratch)), work, batch)
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def _print(result: dict, model: str) -> None:
    table = Table(title=f"importance profile of {model}, measured", title_justify="left")
    for heading in (
        "method",
        "seconds",
        "times faster",
        "quartiles",
        "peak memory (MiB)",
        "largest relative difference of a loss",
    ):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, line in result.items():
        low, high = line["quartiles"]
        cells = [f"{line['seconds']:.1f}", f"{line['times_faster']:.2f}", f"{low:.2f}–{high:.2f}"]
        table.add_row(name, *cells, f"{line['peak_bytes'] / 2**20:.0f}", f"{line['difference']:.1e}")
    Console(width=140).print(table)
    exact = result["exact"]
    met = {
        f"at least {BAR} times faster": exact["times_faster"] >= BAR,
        "peak memory no higher": exact["peak_bytes"] <= result["plain"]["peak_bytes"],
        f"losses equal to {LOSS_TOLERANCE:g} relative": max(line["difference"] for line in result.values()) <= LOSS_TOLERANCE,
    }
    for bar, passed in met.items():
        print(f"{'met' if passed else 'NOT MET'}: {bar}")


def _options() -> argparse.Namespace:
    """The command line, with defaults that depend on the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["bundled", "qwen2_0_5b"], default="bundled")
    parser.add_argument("--windows", type=int, help="calibration windows of 128 tokens (bundled 16, else 1)")
    parser.add_argument("--batch", type=int, help="sequences at a time (bundled 8, else 4)")
    parser.add_argument("--rounds", type=int, help="turns of each candidate (bundled 5, else 1)")
    parser.add_argument("--slice-layers", type=int, help="layers timed in one turn")
    parser.add_argument("--slices", type=int, nargs="*", help="only these slices, from 0; the rest later")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--results", default="results")
    parser.add_argument("--memory", choices=CANDIDATES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    small = options.model == "bundled"
    defaults = {"windows": 16 if small else 1, "batch": 8 if small else 4, "rounds": 5 if small else 1}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    main()
