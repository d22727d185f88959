"""What the machine can do: the peaks of products in three arithmetics and the bandwidth of memory, as calls to time."""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import runs_in_int8
from shadowattn.graphs.estimation import quantised
from shadowattn.interleave import Timing
from shadowattn.kernels import native
from shadowattn.models.linear import has_bfloat16_products, has_onednn, onednn

_MATRIX, _ARRAY = 2048, 64 << 20  # larger than any cache


@dataclass(frozen=True)
class Peak:
    """A peak's `metric` in rows, the work of one call, and the `unit` of 10⁹ of that in a second."""

    metric: str
    work: int
    unit: str

    def rates(self, timing: Timing) -> tuple[float, float, float]:
        """The fastest round's rate, as STREAM reports it; then, for `low` and `high`, the slower quartile's and itself."""
        fastest = min(timing.seconds)
        return tuple(self.work / seconds / 1e9 for seconds in (fastest, timing.quartiles_s[1], fastest))


PEAKS: Mapping[str, Peak] = {
    "bandwidth": Peak("bandwidth", 4 * _ARRAY, "GB/s"),
    "float32": Peak("peak float32", 2 * _MATRIX**3, "GFLOP/s"),
    "bfloat16": Peak("peak bfloat16", 2 * _MATRIX**3, "GFLOP/s"),
    "int8": Peak("peak int8", 2 * _MATRIX**3, "GOP/s"),
    "bfloat16 tiles": Peak("peak bfloat16 tiles", 2 * _MATRIX**3, "GFLOP/s"),
    "int8 tiles": Peak("peak int8 tiles", 2 * _MATRIX**3, "GOP/s"),
}
_OPERATIONS = {torch.bfloat16: 16 * 16 * 32 * 2, torch.int8: 16 * 16 * 64 * 2}  # of a product of tiles


def peak_calls() -> dict[str, Callable[[], object]]:
    """A call for each of `PEAKS`: products of two 2048 × 2048 matrices, and of a matrix of 256 MiB and a vector, by torch.

    A processor without products in bfloat16 has no such peak. In INT8 it may be OpenVINO that multiplies (`multiplies_int8`).
    Where the processor has matrix units, also products of their tiles alone, which load nothing, by the native kernels.
    Raises `InputError` where it cannot.
    """
    a, b = torch.randn(2, _MATRIX, _MATRIX)
    big, half = torch.ones(_ARRAY // _MATRIX, _MATRIX), (a.bfloat16(), b.bfloat16())
    integers = [(20 * x).clamp(-127, 127).to(torch.int8) for x in (a, b)]
    calls = {
        "bandwidth": lambda: big @ big[0],  # the sum of as many numbers was slower
        # By oneDNN where torch has it: its float32 products by MKL reach half of that on some processors.
        "float32": lambda: onednn(a, b, None) if has_onednn() else a @ b,
        "bfloat16": lambda: half[0] @ half[1],
        "int8": (lambda: torch._int_mm(*integers)) if multiplies_int8() == "torch" else int8_product(*integers),
    }
    if native.level() == "amx":
        for dtype, operations in _OPERATIONS.items():
            name = f"{str(dtype).removeprefix('torch.')} tiles"
            calls[name] = partial(native.multiply_tiles, dtype, PEAKS[name].work // operations)
    return calls if has_bfloat16_products() else {name: call for name, call in calls.items() if name != "bfloat16"}


def multiplies_int8() -> str:
    """Whose INT8 products the peak is of: torch's, or on an x86 processor without VNNI, for which torch has but a plain loop of
    some 10⁹ operations a second, OpenVINO's.
    """
    plain = platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_vnni_supported()
    return "OpenVINO" if plain else "torch"


def peak_flag(name: str) -> str:
    """What a row says of a peak that is not of torch's products."""
    return f"of {multiplies_int8()}'s products" if name == "int8" and multiplies_int8() != "torch" else ""


def int8_product(a: Tensor, b: Tensor) -> Callable[[], np.ndarray]:
    """What multiplies two square matrices of int8 by OpenVINO's INT8 kernels, which saturate sums of large pairs without VNNI.

    A call also makes bytes of both matrices' float32 values, a fifth of its time at the size of the peaks or less.
    Returns the product's elements as float32, at [0, 0]. Raises `InputError` where OpenVINO multiplies otherwise.
    """
    size = len(a)
    given = [op.parameter([1, 1, size, size], ov.Type.f32) for _ in range(2)]
    product = op.matmul(*(quantised(x, 1.0) for x in given), False, False)
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = core().compile_model(ov.Model([op.result(product)], given), "CPU", hints)
    if not runs_in_int8(compiled):
        raise InputError(
            "peak int8: expected torch or OpenVINO to multiply in INT8, got a processor on which neither does; measure peaks on "
            "another"
        )
    request, values = compiled.create_infer_request(), [x.float().numpy()[None, None] for x in (a, b)]
    return lambda: request.infer(values, share_inputs=True, share_outputs=True)[0]
