"""What a bank costs: seconds to build, compile, load; memory; microseconds a call. `python -m benchmarks.bank SHAPE`.

54 graphs, 9 buckets × 6 shapes, 256 query rows on up to 4096 keys: launches of one head and of all heads that can be folded. Or
the bank that a file describes (`describe`), `python -m benchmarks.bank FILE.json`. Each phase runs in a process of its own, as
it would for a user; imports are not counted. Linux only, for the memory.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from shadowattn.artifacts import write_json

# Query heads, key/value heads, head dimension (table 5 of the paper).
SHAPES = {
    "qwen2_0_5b": (14, 2, 64),
    "qwen2_1_5b": (12, 2, 128),
    "phonelm_0_5b": (16, 16, 64),
    "phonelm_1_5b": (16, 16, 160),
}
PHASES = ("build", "load", "cache")
UNITS = {
    "graphs": "1", "build_s": "s", "save_s": "s", "compile_s": "s", "compile_one_thread_s": "s", "build_and_compile_s": "s",
    "load_s": "s", "openvino_cache_s": "s", "disk_bytes": "B", "resident_bytes": "B", "buffer_bytes": "B", "infer_us": "us",
    "call_us": "us",
}  # fmt: skip
_ROWS, _KEYS = 256, (1024, 2048, 4096)
_CALLS, _TIMES = 2000, 3
# How many values each figure is a median of.
COUNTS = dict.fromkeys(UNITS, _TIMES) | {"disk_bytes": 1} | dict.fromkeys(("infer_us", "call_us"), _CALLS * _TIMES)


def describe(path: Path, grid, shapes, form) -> Path:
    """Writes down a bank's `ScaleGrid`, `GraphShape`s and `GraphForm`, to be measured in other processes."""
    write_json(path, {"grid": asdict(grid), "shapes": [asdict(shape) for shape in shapes], "form": asdict(form)})
    return path


def measure_bank(shape: str) -> dict[str, float]:
    """All phases for the bank of one model's shape, or of a file, each three times in a fresh process; medians."""
    with tempfile.TemporaryDirectory() as folder:
        figures = {}
        for phase in PHASES:
            command = [sys.executable, "-m", "benchmarks.bank", shape, phase, folder]
            made = [json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(_TIMES)]
            figures |= {name: statistics.median(one[name] for one in made) for name in made[0]}
        files = [path for path in (Path(folder) / "bank").rglob("*") if path.is_file()]
        return figures | {"disk_bytes": sum(path.stat().st_size for path in files)}


def _build(bank_of, folder: Path) -> dict[str, float]:
    """Builds, compiles on all cores, runs every graph once; then memory and calls."""
    import torch

    q, k = _tensors(bank_of())
    before = _resident()
    start = time.perf_counter()
    bank = bank_of()
    built = time.perf_counter()
    bank.compile()
    compiled = time.perf_counter()
    for shape, slot in bank.keys:
        graph = bank.lookup(*bank.pairs[slot], heads=shape.heads, rows=shape.rows, keys=shape.keys, head_dim=shape.head_dim)
        scales = {"q_scales": torch.full((shape.heads,), 0.03), "k_scales": torch.full((shape.kv_heads,), 0.03)}
        graph.run(q[: shape.heads, : shape.rows], k[: shape.kv_heads, : shape.keys], **scales)
    figures = {
        "graphs": len(bank),
        "build_s": built - start,
        "compile_s": compiled - built,
        "build_and_compile_s": compiled - start,
        "resident_bytes": _resident() - before,
        "buffer_bytes": bank.buffer_bytes,
    }
    figures |= _calls()
    start = time.perf_counter()
    bank.save(folder / "bank")
    figures["save_s"] = time.perf_counter() - start
    again = bank_of()
    shutil.rmtree(folder / "blobs", ignore_errors=True)
    start = time.perf_counter()
    again.compile(threads=1, blobs=folder / "blobs")
    return figures | {"compile_one_thread_s": time.perf_counter() - start}


def _load(folder: Path) -> dict[str, float]:
    """From files and blobs to a bank that is ready to run."""
    from shadowattn.graphs import GraphBank

    start = time.perf_counter()
    bank = GraphBank.load(folder / "bank")
    if bank.compile(blobs=folder / "blobs") != len(bank):
        raise RuntimeError("expected every graph among the blobs")
    return {"load_s": time.perf_counter() - start}


def _cache(folder: Path) -> dict[str, float]:
    """The same by OpenVINO's own cache, filled first: it knows a graph again because node names are fixed."""
    import openvino as ov

    from shadowattn.graphs.cpu import cpu_hints

    files = sorted((folder / "bank").glob("*.xml"))
    shutil.rmtree(folder / "cache", ignore_errors=True)
    for _ in range(2):
        core = ov.Core()
        core.set_property({"CACHE_DIR": str(folder / "cache")})
        start = time.perf_counter()
        models = [core.compile_model(path, "CPU", cpu_hints()) for path in files]
        seconds = time.perf_counter() - start
    if not all(model.get_property("LOADED_FROM_CACHE") for model in models):
        raise RuntimeError("expected every graph to come from OpenVINO's cache")
    return {"openvino_cache_s": seconds}


def _calls() -> dict[str, float]:
    """Median microseconds of a call on a graph too small to compute anything: bound tensors alone, and with both copies."""
    import numpy as np
    import openvino as ov
    import torch

    from shadowattn.graphs import GraphForm, GraphShape
    from shadowattn.graphs.cpu import cpu_hints
    from shadowattn.graphs.estimation import estimation_graph
    from shadowattn.graphs.graph import Arena, Graph

    shape, form = GraphShape(1, 1, 64, 16), GraphForm()
    model = ov.Core().compile_model(estimation_graph(shape, form, 0.1, 0.1), "CPU", cpu_hints())
    graph = Graph(model, shape, form, (0.1, 0.1), Arena([model]))
    q, k = torch.randn(1, 1, 64), torch.randn(1, 16, 64)
    figures = {}
    for name, call in (("infer_us", graph.infer), ("call_us", lambda: graph.run(q, k))):
        seconds = []
        for _ in range(_CALLS):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        figures[name] = float(np.median(seconds)) * 1e6
    return figures


def _tensors(bank):
    """Q and K for the largest graph, made before memory is counted."""
    import torch

    heads, rows, kv_heads, keys, dim = (
        max(getattr(shape, name) for shape in bank.shapes) for name in ("heads", "rows", "kv_heads", "keys", "head_dim")
    )
    return torch.randn(heads, rows, dim), torch.randn(kv_heads, keys, dim)


def _bank_of(shape: str):
    from shadowattn.graphs import GraphBank, GraphForm, GraphShape
    from shadowattn.graphs.planner import ShapePlan, plan_shapes
    from shadowattn.types import Requant, RetentionProfile, ScaleGrid

    if shape in SHAPES:
        heads, kv_heads, head_dim = SHAPES[shape]
        scales, form = ScaleGrid((0.05, 0.1, 0.2), (0.05, 0.1, 0.2)), GraphForm()
        plan = ShapePlan((_ROWS,), _KEYS, 0.0, "powers")
        shapes = plan_shapes(plan, heads=heads, kv_heads=kv_heads, head_dim=head_dim, launch_heads=(1, heads))
    else:
        described = json.loads(Path(shape).read_text())
        scales, requant = ScaleGrid(**described["grid"]), described["form"]["requant"]
        shapes = tuple(GraphShape(**one) for one in described["shapes"])
        form = GraphForm(described["form"]["inputs"], Requant(**requant) if requant else None)
    profile = RetentionProfile(((1.0,) * shapes[0].heads,), scales, shapes[0].head_dim, "", shape, "uniform")
    return lambda: GraphBank.build(profile, shapes, form=form)


def _resident() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """One phase where it is named, else all of them."""
    shape = sys.argv[1] if len(sys.argv) > 1 else ""
    if not (shape in SHAPES or Path(shape).is_file()) or len(sys.argv) not in (2, 4):
        raise SystemExit(
            f"error: expected one of {', '.join(SHAPES)} or a file, got {' '.join(sys.argv[1:]) or 'nothing'}\n{__doc__}"
        )
    if len(sys.argv) == 2:
        for name, value in measure_bank(shape).items():
            print(f"{name:24} {value:.4g}")
        return
    import torch  # noqa: F401 - imports do not count

    bank_of, folder = _bank_of(shape), Path(sys.argv[3])
    phases = {"build": lambda: _build(bank_of, folder), "load": lambda: _load(folder), "cache": lambda: _cache(folder)}
    print(json.dumps(phases[sys.argv[2]]()))


if __name__ == "__main__":
    main()
