"""Which device runs the estimate. A missing NPU is reported and the CPU named in every row, never swapped in silently."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import openvino as ov

from shadowattn.device_check import SMALLEST, Case, check_device
from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import multiplies_exactly

DEVICES = ("auto", "npu", "gpu", "cpu")
# Of the exact top 20 % in the check: float16 scores find 0.9998 of them, INT8 ones, whose steps make ties, above this.
LEAST_RECALL = 0.98
SELFCHECK = "python -m experiments.run +exp=npu_selfcheck"
# Nobody of us had one: what stands in the documentation as unverified, in one place.
UNVERIFIED = (
    "that its integers are those of integer arithmetic, and how far float16 scores move the top-k there",
    "that a blob compiled ahead is imported",
    "what decoder blocks and attention compute there",
    "launch cost and latency: what the compiler predicts leaves the launch out and does not price every operation",
)


@dataclass(frozen=True)
class EstimateDevice:
    """`name` as OpenVINO lists it, and in one line why this one."""

    name: str
    reason: str

    @property
    def label(self) -> str:
        """As rows have it: a CPU whose INT8 products saturate multiplies in float32 (`graphs.cpu`)."""
        return self.name if self.name != "CPU" or multiplies_exactly() else "CPU in float32"


@dataclass(frozen=True)
class Capability:
    """What is known of one device of this machine. `problem` is empty where a small INT8 graph ran on it and was right."""

    name: str
    full_name: str
    driver: str
    capabilities: tuple[str, ...]
    problem: str


def _smallest(name: str) -> dict[str, Case]:
    return {"a small INT8 graph": SMALLEST}


def find_estimate_device(requested: str, cases: Callable[[str], Mapping[str, Case]] = _smallest) -> EstimateDevice:
    """The OpenVINO device for `auto`, `npu`, `gpu` or `cpu`.

    `auto` takes the NPU where OpenVINO lists one and the graphs `cases(name)`, by what they are, run on it: such as are to run
    there; else the CPU; a GPU only by name. Raises `InputError` for a device that was asked for by name and is not there or does
    not work.
    """
    if requested not in DEVICES:
        raise InputError(f"device: expected one of {', '.join(DEVICES)}, got {requested!r}")
    if requested == "cpu":
        return EstimateDevice("CPU", "asked for")
    name = _listed("GPU" if requested == "gpu" else "NPU")
    problem = find_problem(name, cases)
    if problem is None:
        return EstimateDevice(name, "listed by OpenVINO, and graphs of the run's forms ran on it")
    if requested != "auto":
        raise InputError(f"device={requested}: {problem}; use device=auto or device=cpu")
    return EstimateDevice("CPU", problem)


def find_problem(name: str, cases: Callable[[str], Mapping[str, Case]] = _smallest) -> str | None:
    """What keeps a device from running the graphs `cases(name)`, or None.

    Only `available_devices` counts: NPUW claims an NPU without one.
    """
    listed = core().available_devices
    if name not in listed:
        return f"no {name} among OpenVINO's devices ({', '.join(listed)})"
    for outcome in check_device(name, cases(name)):
        if outcome.error:
            return f"{name} is listed but {outcome.case} fails on it ({outcome.error})"
        if outcome.recall < LEAST_RECALL:
            return f"{name} is listed but ranks keys wrongly: {outcome.case} finds {outcome.recall:.0%} of the top 20 %"
    return None


def _listed(name: str) -> str:
    """The device as OpenVINO lists it: the first one, such as GPU.0, where there are several of a kind."""
    several = [device for device in sorted(core().available_devices) if device.split(".")[0] == name]
    return several[0] if several else name


def drivers() -> dict[str, str]:
    """Of every device that OpenVINO lists, its full name and driver."""
    return {
        name: f"{_property(name, 'FULL_DEVICE_NAME')}, driver {_property(name, 'DRIVER_VERSION')}"
        for name in core().available_devices
    }


def device_architecture(name: str) -> str:
    """What a device calls its architecture, such as 4000 of an NPU; empty where it does not say."""
    return str(_property(name, "DEVICE_ARCHITECTURE") or "").removeprefix("NPU")


def survey() -> list[Capability]:
    """Every device that OpenVINO lists, tried with a small graph; and NPU and GPU also where they are missing."""
    devices = []
    for name in sorted({*core().available_devices, _listed("NPU"), _listed("GPU")}):
        problem = find_problem(name)
        if name not in core().available_devices:
            devices.append(Capability(name, "not found", "none", (), problem))
            continue
        driver = "with OpenVINO " + ov.get_version() if name == "CPU" else str(_property(name, "DRIVER_VERSION"))
        capabilities = tuple(_property(name, "OPTIMIZATION_CAPABILITIES") or ())
        devices.append(Capability(name, str(_property(name, "FULL_DEVICE_NAME")), driver, capabilities, problem or ""))
    return devices


def _property(device: str, name: str):
    """A property, or None where the device does not know it."""
    try:
        return core().get_property(device, name)
    except RuntimeError:
        return None
