"""What Intel's NPU compiler says of a graph, read from its log.

The log is what `dump-task-stats=true` prints at LOG_INFO. A figure that a platform's log has not (operation counts, on 3720) is
NaN; one that the compiler gives in another form than was tested is an error, and no default.
"""

import math
import re
from dataclasses import dataclass

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LATENCY = re.compile(r"Estimated inference latency: ([\d.]+) us in dpu frequency ([\d.]+) MHz")
_UNPRICED = re.compile(r"unsupported by VPUNN, which can influence the estimation: \[([^\]]*)\]")
_TASKS = re.compile(r"\[dump-statistics-of-task-ops\] +(VPUIP\.\w+(?:\.\w+)?|NCETask Operations|builtin_\w+) - (\d+) ops")
_VERSION = re.compile(r"VCL Compiler Properties: ID: ([^,]+), Version: ([\d.]+)")
_RESULT = re.compile(r"^@result\t(\d+)\t([\d.]+)\t(.*)$", re.MULTILINE)
_ACTIVITY = re.compile(r"compiled Activity Factor - ([\d.]+)")
_GROUPS = re.compile(r"DPU groups = (\d+)")
_ERROR = re.compile(r"\[ERROR\](?: [\d:.]+)?(?: \[[\w-]+\])? *([^\n]+)")
_LONGEST = 200


@dataclass(frozen=True)
class CompiledGraph:
    """What came of one graph on one platform. `error` is empty where it compiled; figures are NaN where there is none.

    `predicted_us`: by the compiler's cost model, at `dpu_mhz`, without launch cost; `unpriced`: software kernels that the model
    knows no or not the whole price of. `fp_ops`, `int_ops`: multiply-accumulates of the matrix engine, by arithmetic. `tasks`: of
    the matrix engine (`dpu`), of the vector engine (`shave`) and copies (`dma`); `kernels`: the vector engine's by name.
    """

    error: str = ""
    compile_s: float = math.nan
    blob_bytes: float = math.nan
    predicted_us: float = math.nan
    dpu_mhz: float = math.nan
    fp_ops: float = math.nan
    int_ops: float = math.nan
    activity: float = math.nan
    dpu_groups: float = math.nan
    tasks: dict[str, int] | None = None
    kernels: dict[str, int] | None = None
    unpriced: tuple[str, ...] = ()


def read_log(log: str, *, blob_bytes: int | None = None) -> CompiledGraph:
    """The figures of one graph's log, up to and with its `@result` line. A log without that line is of a process that died."""
    text = _COLOUR.sub("", log)
    if not (results := _RESULT.findall(text)):
        return CompiledGraph(error=_reason(text, "the compiler's process ended"))
    status, seconds, message = results[-1]
    if status != "0":
        return CompiledGraph(error=_reason(text, message or f"status {status}"), compile_s=float(seconds))
    latency = _LATENCY.search(text)
    unpriced = _UNPRICED.search(text)
    kinds = dict(_counts(text))
    kernels = {name.removeprefix("builtin_"): n for name, n in kinds.items() if name.startswith("builtin_")}
    return CompiledGraph(
        compile_s=float(seconds),
        blob_bytes=math.nan if blob_bytes is None else float(blob_bytes),
        predicted_us=float(latency[1]) if latency else math.nan,
        dpu_mhz=float(latency[2]) if latency else math.nan,
        fp_ops=_number(re.compile(r"Total number of FPOps: (\d+)"), text),
        int_ops=_number(re.compile(r"Total number of INTOps: (\d+)"), text),
        activity=_number(_ACTIVITY, text),
        dpu_groups=_number(_GROUPS, text),
        tasks={
            "dpu": kinds.get("NCETask Operations", 0),
            "shave": kinds.get("VPUIP.SW.Kernel", 0),
            "dma": kinds.get("VPUIP.NNDMA", 0),
        },
        kernels=kernels,
        unpriced=tuple(name.strip().removeprefix("builtin_") for name in unpriced[1].split(",")) if unpriced else (),
    )


def compiler_version(log: str) -> str:
    """The version and build of the compiler that wrote a log; empty where the log does not say."""
    found = _VERSION.search(_COLOUR.sub("", log))
    return f"{found[2]} ({found[1]})" if found else ""


def _counts(text: str) -> list[tuple[str, int]]:
    return [(name, int(count)) for name, count in _TASKS.findall(text)]


def _number(pattern: re.Pattern, text: str) -> float:
    found = pattern.search(text)
    return float(found[1]) if found else math.nan


def _reason(text: str, otherwise: str) -> str:
    """The first error that the compiler names, else what the plugin says; one line."""
    errors = [" ".join(error.split()) for error in _ERROR.findall(text)]
    return (errors[0] if errors else " ".join(otherwise.split()))[:_LONGEST]
