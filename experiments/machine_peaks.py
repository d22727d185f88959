"""What the machine can do: the peaks of matrix products in three arithmetics and the bandwidth of memory, as calls to time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from shadowattn.interleave import Timing
from shadowattn.models.linear import has_onednn, onednn

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
}


def peak_calls() -> dict[str, Callable[[], object]]:
    """A call for each of `PEAKS`: products of two 2048 × 2048 matrices, of a matrix of 256 MiB and a vector, all by torch."""
    a, b = torch.randn(2, _MATRIX, _MATRIX)
    big, half = torch.ones(_ARRAY // _MATRIX, _MATRIX), (a.bfloat16(), b.bfloat16())
    integers = [(20 * x).clamp(-127, 127).to(torch.int8) for x in (a, b)]
    return {
        "bandwidth": lambda: big @ big[0],  # the sum of as many numbers was slower
        # By oneDNN where torch has it: its float32 products by MKL reach half of that on some processors.
        "float32": lambda: onednn(a, b, None) if has_onednn() else a @ b,
        "bfloat16": lambda: half[0] @ half[1],
        "int8": lambda: torch._int_mm(*integers),
    }
