"""Which device runs the estimate. A missing NPU is reported and the CPU named in every row, never swapped in silently."""

import subprocess
import sys
from dataclasses import dataclass

import openvino as ov

from shadowattn.errors import InputError

# Runs in a process of its own, because an NPU compiler that does not like its driver aborts rather than raises.
_PROBE = """
import numpy as np, openvino as ov
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.estimation import FLOAT, estimation_graph
request = ov.Core().compile_model(estimation_graph(GraphShape(1, 16, 64, 16), FLOAT, 0.1, 0.1), "NPU").create_infer_request()
request.infer([np.ones((1, 1, 16, 64), np.float32), np.ones((1, 1, 16, 64), np.float32)])
"""


@dataclass(frozen=True)
class EstimateDevice:
    """`name` as OpenVINO lists it, and in one line why this one."""

    name: str
    reason: str


def find_estimate_device(requested: str) -> EstimateDevice:
    """The OpenVINO device for `auto`, `npu` or `cpu`.

    `auto` takes the NPU where OpenVINO lists one and a small graph runs on it, else the CPU. Raises `InputError` for an NPU that
    was asked for by name and is not there or does not work.
    """
    if requested not in ("auto", "npu", "cpu"):
        raise InputError(f"device: expected auto, npu or cpu, got {requested!r}")
    if requested == "cpu":
        return EstimateDevice("CPU", "asked for")
    problem = _npu_problem()
    if problem is None:
        return EstimateDevice("NPU", "listed by OpenVINO, and a small INT8 graph ran on it")
    if requested == "npu":
        raise InputError(f"device=npu: {problem}; use device=auto or device=cpu")
    return EstimateDevice("CPU", problem)


def _npu_problem() -> str | None:
    """What keeps the NPU from being used, or None. Only `available_devices` counts: NPUW claims an NPU without one."""
    listed = ov.Core().available_devices
    if "NPU" not in listed:
        return f"no NPU among OpenVINO's devices ({', '.join(listed)})"
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300, check=False)
    if probe.returncode == 0:
        return None
    last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
    return f"an NPU is listed but a small INT8 graph fails on it (exit status {probe.returncode}: {last})"
