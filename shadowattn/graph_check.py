"""Does a device run a whole graph as the CPU device does, and how fast? Decoder blocks, attention, and blobs compiled ahead.

`python -m shadowattn.graph_check DEVICE CASE …`, each case a JSON object with the graph's file and, where it was compiled ahead,
its blob's. Such a graph is not one of scores, whose integers `device_check` compares: the difference to the CPU is a ratio.
"""

import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import openvino as ov

from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import cpu_hints
from shadowattn.interleave import repeated
from shadowattn.isolated import run_apart

_RUNS, _LONG_S = 30, 2.0
_MOST_DIFFERENCE = 0.05
_LEAST, _MOST = -127, 128
# Inputs of blocks that are no data (`decoder.tensors`): of activations up to 3, and weights of a standard deviation of 0.02.
_STEP, _SCALE = 127 / 3, 3 / 127 * 0.08 / 127


@dataclass(frozen=True)
class GraphFile:
    """A graph to be tried: what it is, its `.xml`, and its blob for the device where it was compiled ahead."""

    case: str
    graph: str
    blob: str = ""


@dataclass(frozen=True)
class GraphOutcome:
    """What one graph came to. `error` is empty where it ran; figures are NaN where it did not.

    `difference`: root mean square of the difference to the CPU device's output, of that output. `runs`: how many were timed.
    """

    case: str
    error: str = ""
    compile_s: float = float("nan")
    median_ms: float = float("nan")
    p95_ms: float = float("nan")
    difference: float = float("nan")
    runs: int = 0

    @property
    def agrees(self) -> bool:
        """Whether it ran, and differs from the CPU's by no more than roundings of 16 bits and of INT8 steps do."""
        return not self.error and self.difference <= _MOST_DIFFERENCE


def check_graphs(device: str, graphs: Sequence[GraphFile], *, progress: Callable = iter) -> list[GraphOutcome]:
    """All graphs on one device. One that takes the process down is reported with its exit status, and the rest still run."""
    given = [asdict(graph) for graph in graphs]
    return [GraphOutcome(**outcome) for outcome in run_apart("shadowattn.graph_check", device, given, progress=progress)]


def run_graph(device: str, graph: GraphFile) -> GraphOutcome:
    """Compiles or imports, runs, compares and times one graph in this process. What the device raises becomes the `error`."""
    model = core().read_model(graph.graph)
    inputs, hints = _inputs(model), cpu_hints() if device == "CPU" else {}
    try:
        start = time.perf_counter()
        if graph.blob:
            compiled = core().import_model(io.BytesIO(Path(graph.blob).read_bytes()), device, hints)
        else:
            compiled = core().compile_model(model, device, hints)
        compile_s = time.perf_counter() - start
        request = compiled.create_infer_request()
        for index, value in enumerate(inputs):
            request.set_input_tensor(index, ov.Tensor(value))
        request.infer()
        out = [np.array(request.get_output_tensor(index).data, np.float32) for index in range(len(compiled.outputs))]
        seconds = repeated(request.infer, most=_RUNS, most_s=_LONG_S)
    except RuntimeError as error:  # what OpenVINO raises, for whatever reason
        return GraphOutcome(graph.case, error=" ".join(str(error).split())[-300:])
    median, p95 = np.percentile(seconds, (50, 95)) * 1e3
    return GraphOutcome(
        graph.case, "", compile_s, float(median), float(p95), _difference(out, _on_cpu(model, inputs)), len(seconds)
    )


def _inputs(model: ov.Model) -> list[np.ndarray]:
    """Normal values, or integers of all sizes, of each input's shape; steps and scales of weights as they usually are."""
    generator = np.random.default_rng(0)
    made = []
    for port in model.inputs:
        shape, dtype = tuple(port.get_shape()), port.get_element_type().to_dtype()
        if port.any_name.endswith((".step", ".scale")):
            made.append(np.full(shape, _STEP if port.any_name.endswith(".step") else _SCALE, dtype))
        elif np.issubdtype(dtype, np.integer):
            made.append(generator.integers(_LEAST, _MOST, shape).astype(dtype))
        else:
            made.append(generator.standard_normal(shape).astype(dtype))
    return made


def _on_cpu(model: ov.Model, inputs: list[np.ndarray]) -> list[np.ndarray]:
    compiled = core().compile_model(model, "CPU", cpu_hints())  # INT8 products saturate on processors without VNNI
    results = compiled(inputs)
    return [np.array(results[index], np.float32) for index in range(len(compiled.outputs))]


def _difference(out: list[np.ndarray], expected: list[np.ndarray]) -> float:
    off = sum(float(np.sum((a - b).astype(np.float64) ** 2)) for a, b in zip(out, expected, strict=True))
    size = sum(float(np.sum(b.astype(np.float64) ** 2)) for b in expected)
    return float(np.sqrt(off / size)) if size else float(np.sqrt(off))


if __name__ == "__main__":
    for given in map(json.loads, sys.argv[2:]):
        print(json.dumps(asdict(run_graph(sys.argv[1], GraphFile(**given)))), flush=True)
