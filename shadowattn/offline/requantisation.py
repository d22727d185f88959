"""The range of the integer products, observed on calibration text: what INT8 scores are rounded by (`types.Requant`).

The authors search a multiplier on the device that puts the largest score between 96 and 126; here the largest product is computed
and the multiplier that puts it at 127 taken from it. Keys after a row count too, as with them: the product is a full rectangle.
Keys are those less the grid's key offset: a constant that all scores of a row share would take most of the 256 levels.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.evaluation.perplexity import prefill_chunks
from shadowattn.graphs.buckets import nearest_pair
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.graphs.symmetric_int8 import quantise, shifted
from shadowattn.offline.calibrations.absmax import Absmax
from shadowattn.offline.scales import RunningScales, watch_attention
from shadowattn.online.attention import Request
from shadowattn.types import Requant, ScaleGrid

_MARGIN, _PERCENTILE = 1.05, 5


@dataclass(frozen=True)
class OutputObservations:
    """One entry for each layer, query head and chunk: (multiplier that puts the largest product at 127, its output scale)."""

    observed: tuple[tuple[float, float], ...]

    def requant(self, mode: str) -> Requant:
        """`target_requant`: the 5th percentile of the multipliers / 1.05. `fixed_output`: the largest output scale × 1.05."""
        multipliers, scales = zip(*self.observed, strict=True)
        if mode == "fixed_output":
            return Requant(mode, max(scales) * _MARGIN)
        return Requant(mode, float(np.percentile(multipliers, _PERCENTILE)) / _MARGIN)


def observe_outputs(
    model: PreTrainedModel,
    windows: Tensor,
    grid: ScaleGrid,
    *,
    chunk_tokens: int,
    distance: str = "raw",
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> OutputObservations:
    """Runs the windows [W, T] through the model, dense, and quantises every chunk by the bucket that would serve it online."""
    observed = []
    measure = RunningScales(Absmax(), grid.key_offset)

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request: Request) -> None:
        group, keys = q.shape[1] // k.shape[1], shifted(k[0], grid.key_offset, layer)
        for head, measured in enumerate(measure(layer, q[0], k[0], request.caches[0])):
            pair = grid.pairs[nearest_pair(grid.pairs, *measured, distance=distance)]
            peak = largest_product(q[0, head], keys[head // group], pair)
            if peak:
                multiplier = INT8_MAX / peak
                observed.append((multiplier, pair[0] * pair[1] / multiplier))

    with watch_attention(model, observe):
        for window in progress(windows):
            for _ in prefill_chunks(model, window, chunk_tokens=chunk_tokens):
                pass
    return OutputObservations(tuple(observed))


def largest_product(q: Tensor, k: Tensor, pair: tuple[float, float]) -> float:
    """Largest magnitude of the integer products of q [Q, D] and k [K, D] in a bucket."""
    q8, k8 = (quantise(x[None], x.new_tensor([scale]))[0].float() for x, scale in zip((q, k), pair, strict=True))
    return float((q8 @ k8.T).abs().max())  # exact in float32: below 2²⁴ for D up to 1040
