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

from shadowattn.engine.observe import observe_prefill
from shadowattn.graphs.buckets import nearest_pair
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.graphs.symmetric_int8 import quantise, shifted
from shadowattn.offline.calibrations.absmax import Absmax
from shadowattn.offline.scales import RunningScales
from shadowattn.online.chunk import Chunk
from shadowattn.types import Requant, ScaleGrid

_MARGIN, _PERCENTILE = 1.05, 5


@dataclass(frozen=True)
class ProductObservations:
    """One entry for each layer, query head and chunk: (multiplier that puts the largest product at 127, its output scale)."""

    observed: tuple[tuple[float, float], ...]

    def requant(self, mode: str) -> Requant:
        """`target_requant`: the 5th percentile of the multipliers / 1.05. `fixed_output`: the largest output scale × 1.05."""
        multipliers, scales = zip(*self.observed, strict=True)
        if mode == "fixed_output":
            return Requant(mode, max(scales) * _MARGIN)
        return Requant(mode, float(np.percentile(multipliers, _PERCENTILE)) / _MARGIN)


def observe_products(
    model: PreTrainedModel,
    windows: Tensor,
    grid: ScaleGrid,
    *,
    chunk_tokens: int,
    distance: str = "raw",
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> ProductObservations:
    """Runs the windows [W, T] through the model, dense, and quantises every chunk by the bucket that would serve it online."""
    observed = []
    measure = RunningScales(Absmax(), grid.key_offset)

    def observe(chunk: Chunk) -> None:
        keys = shifted(chunk.k, grid.key_offset, chunk.layer)
        for q, group, measured in zip(chunk.q, chunk.heads.kv.tolist(), measure(chunk), strict=True):
            pair = grid.pairs[nearest_pair(grid.pairs, *measured, distance=distance)]
            peak = largest_product(q, keys[group], pair)
            if peak:
                multiplier = INT8_MAX / peak
                observed.append((multiplier, pair[0] * pair[1] / multiplier))

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    return ProductObservations(tuple(observed))


def largest_product(q: Tensor, k: Tensor, pair: tuple[float, float]) -> float:
    """Largest magnitude of the integer products of q [Q, D] and k [K, D] in a bucket."""
    q8, k8 = (quantise(x[None], x.new_tensor([scale]))[0].float() for x, scale in zip((q, k), pair, strict=True))
    return float((q8 @ k8.T).abs().max())  # exact in float32: below 2²⁴ for D up to 1040
