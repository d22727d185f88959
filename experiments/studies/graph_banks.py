"""What a bank costs: seconds to build, compile, load; memory; microseconds a call.

Each phase runs in a process of its own, as it would for a user; imports are not counted. Linux only, for the memory.
"""

import math
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from experiments import random_layers
from experiments.own_process import in_own_process, resident_bytes
from shadowattn.graphs import GraphBank, GraphForm, GraphShape
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import cpu_hints
from shadowattn.graphs.estimation import estimation_graph
from shadowattn.graphs.graph import Arena, Graph
from shadowattn.graphs.planner import ShapePlan, plan_shapes
from shadowattn.types import RetentionProfile, ScaleGrid

# The same shapes, by names as `model.shape` has them.
SHAPES = {re.sub("[-.]", "_", name): shape for name, shape in random_layers.SHAPES.items()}
UNITS = {
    "graphs": "1", "build_s": "s", "save_s": "s", "compile_s": "s", "compile_one_thread_s": "s", "build_and_compile_s": "s",
    "load_s": "s", "openvino_cache_s": "s", "disk_bytes": "B", "resident_bytes": "B", "buffer_bytes": "B", "infer_us": "us",
    "call_us": "us",
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What a bank is built of."""

    grid: ScaleGrid
    shapes: tuple[GraphShape, ...]
    form: GraphForm

    @classmethod
    def of(cls, model: str, *, rows: int, keys: Sequence[int]) -> "Recipe":
        """9 buckets; launches of one head and of all heads of a model's shape that can be folded."""
        heads, kv_heads, head_dim = SHAPES[model]
        plan = ShapePlan((rows,), tuple(keys), 0.0, "powers")
        shapes = plan_shapes(
            plan, heads=heads, kv_heads=kv_heads, head_dim=head_dim, launch_heads=(1, heads), shared_bytes=math.inf
        )
        return cls(ScaleGrid((0.05, 0.1, 0.2), (0.05, 0.1, 0.2)), tuple(shapes), GraphForm())

    def bank(self) -> GraphBank:
        first = self.shapes[0]
        profile = RetentionProfile(((1.0,) * first.heads,), self.grid, first.head_dim, "", "", "uniform")
        return GraphBank.build(profile, self.shapes, form=self.form)


def measure_bank(recipe: Recipe, *, calls: int, times: int) -> dict[str, float]:
    """Every phase `times` times, each in a fresh process; medians. `calls` calls of a graph in each."""
    phases = ((_build, (calls,)), (_load, ()), (_cache, ()))
    with tempfile.TemporaryDirectory() as folder:
        figures = {}
        for phase, further in phases:
            runs = [in_own_process(phase, recipe, Path(folder), *further) for _ in range(times)]
            figures |= {name: statistics.median(one[name] for one in runs) for name in runs[0]}
        files = [path for path in (Path(folder) / "bank").rglob("*") if path.is_file()]
        return figures | {"disk_bytes": sum(path.stat().st_size for path in files)}


def counts(*, calls: int, times: int) -> dict[str, int]:
    """How many values each figure is a median of."""
    return dict.fromkeys(UNITS, times) | {"disk_bytes": 1} | dict.fromkeys(("infer_us", "call_us"), calls * times)


def _build(recipe: Recipe, folder: Path, calls: int) -> dict[str, float]:
    """Builds, compiles on all cores, runs every graph once; then memory and calls."""
    q, k = _tensors(recipe)
    before = resident_bytes()
    start = time.perf_counter()
    bank = recipe.bank()
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
        "resident_bytes": resident_bytes() - before,
        "buffer_bytes": bank.buffer_bytes,
    }
    figures |= _calls(calls)
    start = time.perf_counter()
    bank.save(folder / "bank")
    figures["save_s"] = time.perf_counter() - start
    again = recipe.bank()
    shutil.rmtree(folder / "blobs", ignore_errors=True)
    start = time.perf_counter()
    again.compile(threads=1, blobs=folder / "blobs")
    return figures | {"compile_one_thread_s": time.perf_counter() - start}


def _load(recipe: Recipe, folder: Path) -> dict[str, float]:
    """From files and blobs to a bank that is ready to run."""
    start = time.perf_counter()
    bank = GraphBank.load(folder / "bank")
    if bank.compile(blobs=folder / "blobs") != len(bank):
        raise RuntimeError("expected every graph among the blobs")
    return {"load_s": time.perf_counter() - start}


def _cache(recipe: Recipe, folder: Path) -> dict[str, float]:
    """The same by OpenVINO's own cache, filled first: it knows a graph again because node names are fixed."""
    files = sorted((folder / "bank").glob("*.xml"))
    shutil.rmtree(folder / "cache", ignore_errors=True)
    hints = cpu_hints() | {"CACHE_DIR": str(folder / "cache")}
    for _ in range(2):
        start = time.perf_counter()
        models = [core().compile_model(path, "CPU", hints) for path in files]
        seconds = time.perf_counter() - start
    if not all(model.get_property("LOADED_FROM_CACHE") for model in models):
        raise RuntimeError("expected every graph to come from OpenVINO's cache")
    return {"openvino_cache_s": seconds}


def _calls(count: int) -> dict[str, float]:
    """Median microseconds of a call on a graph too small to compute anything: bound tensors alone, and with both copies."""
    shape, form = GraphShape(1, 1, 64, 16), GraphForm()
    model = core().compile_model(estimation_graph(shape, form, 0.1, 0.1), "CPU", cpu_hints())
    graph = Graph(model, shape, form, (0.1, 0.1), Arena([model]))
    q, k = torch.randn(1, 1, 64), torch.randn(1, 16, 64)
    figures = {}
    for name, call in (("infer_us", graph.infer), ("call_us", lambda: graph.run(q, k))):
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        figures[name] = float(np.median(seconds)) * 1e6
    return figures


def _tensors(recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K for the largest graph, made before memory is counted."""
    heads, rows, kv_heads, keys, dim = (
        max(getattr(shape, name) for shape in recipe.shapes) for name in ("heads", "rows", "kv_heads", "keys", "head_dim")
    )
    return torch.randn(heads, rows, dim), torch.randn(kv_heads, keys, dim)
