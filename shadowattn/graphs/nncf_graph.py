"""The same graph quantised by NNCF from calibration data: a third way beside scales built in and scales as inputs.

NNCF measures the ranges itself and takes one for each input, so it makes one bucket; 256 levels, −128 … 127, where the explicit
forms have 255.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as op

from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import cpu_hints, multiplies_exactly, runs_in_int8

PRESETS = ("performance", "mixed")


@dataclass(frozen=True)
class NNCFGraph:
    """A compiled graph, the largest chunk that it takes, and `steps`: what the integers of its inputs `q` and `k` stand for.

    `fingerprint`: of the model whose text it was calibrated on; empty: not known.
    """

    model: ov.CompiledModel
    shape: GraphShape
    steps: Mapping[str, float]
    fingerprint: str = ""


def compiled_nncf_graph(shape: GraphShape, samples: Sequence[tuple[np.ndarray, np.ndarray]], *, fingerprint: str) -> NNCFGraph:
    """`nncf_graph` of these samples, compiled."""
    graph = nncf_graph(shape, samples)
    return NNCFGraph(compile_int8(graph, what="nncf"), shape, input_steps(graph), fingerprint)


def nncf_graph(shape: GraphShape, samples: Sequence[tuple[np.ndarray, np.ndarray]], *, preset: str = "performance") -> ov.Model:
    """Q·Kᵀ with the ranges that NNCF finds in `samples`: pairs of q [1, G, M, D] and k [1, G, keys, D], float32, at least one.

    Inputs and output as `estimation_graph` has them. `mixed` quantises asymmetrically, which OpenVINO's CPU plugin then runs in
    floating point: see `compile_int8`.
    """
    if preset not in PRESETS:
        raise InputError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    if not samples:
        raise InputError("samples: expected at least one pair of q and k to calibrate on, got none")
    import nncf  # a second to import, and only for this

    nncf.set_log_level(logging.ERROR)
    lead = [1, shape.kv_heads]
    q = op.parameter([*lead, shape.group * shape.rows, shape.head_dim], ov.Type.f32)
    k = op.parameter([*lead, shape.keys, shape.head_dim], ov.Type.f32)
    for name, parameter in (("q", q), ("k", k)):
        parameter.output(0).set_names({name})
    model = ov.Model([op.result(op.matmul(q, k, transpose_a=False, transpose_b=True))], [q, k], "estimate")
    quantised = nncf.quantize(
        model, nncf.Dataset([list(pair) for pair in samples]), preset=nncf.QuantizationPreset(preset), subset_size=len(samples)
    )
    quantised.output(0).set_names({"scores"})
    return quantised


def input_steps(model: ov.Model) -> dict[str, float]:
    """By name of the input, the step between the integers that NNCF gave it: symmetric, −128 … 127."""
    steps = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "FakeQuantize":
            low, high = (node.input_value(index).get_node().data.item() for index in (1, 2))
            steps[node.input_value(0).get_any_name()] = (high - low) / (node.get_attributes()["levels"] - 1)
    return steps


def compile_int8(model: ov.Model, *, what: str) -> ov.CompiledModel:
    """Compiles for the CPU. Raises `InputError` where the plugin would run the product in floating point, unsaid.

    On a processor whose INT8 products saturate, what passes is compiled again to multiply in float32 (`cpu.cpu_hints`).
    """
    compiled = core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    if not runs_in_int8(compiled):
        raise InputError(
            f"{what}: expected an INT8 product, but the CPU plugin compiled it in floating point; use another preset"
        )
    return compiled if multiplies_exactly() else core().compile_model(model, "CPU", cpu_hints())
