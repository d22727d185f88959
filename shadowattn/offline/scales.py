"""INT8 scales: observed on calibration text, summed up in a small static grid (section 3.3).

A scale is absmax / 127 after RoPE, or what another calibration makes of the values: of Q over the rows of a chunk, of K the
largest of all chunks so far, hence monotone, as the estimator measures them online. With a key offset (`key_offsets`) the keys
are K minus that offset. Text is streamed chunk by chunk; of a chunk, two numbers for each head stay.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.observe import observe_prefill
from shadowattn.graphs.buckets import nearest_pair
from shadowattn.graphs.symmetric_int8 import shifted
from shadowattn.offline.calibrations import Calibration
from shadowattn.offline.calibrations.absmax import Absmax
from shadowattn.offline.grids import Grid
from shadowattn.offline.grids.mean import Mean
from shadowattn.online.chunk import Chunk
from shadowattn.types import KeyOffset, ScaleGrid


@dataclass(frozen=True)
class ScaleObservations:
    """Pairs of scales, one for each layer, query head and chunk seen: (layer, head, q_scale, k_scale).

    With a `key_offset` K's are those of k − offset.
    """

    pairs: tuple[tuple[int, int, float, float], ...]
    key_offset: KeyOffset | None = None

    def __post_init__(self):
        object.__setattr__(self, "key_offset", KeyOffset.read(self.key_offset))

    def mean(self) -> tuple[float, float]:
        q, k = (sum(pair[axis] for pair in self.pairs) / len(self.pairs) for axis in (2, 3))
        return q, k

    def of_layer(self, layer: int) -> "ScaleObservations":
        """What was seen in one layer."""
        return replace(self, pairs=tuple(pair for pair in self.pairs if pair[0] == layer))

    def fit(self, grid: ScaleGrid) -> dict[str, float]:
        """How the grid serves what was observed: shares of heads clipped, and the share of the most used bucket."""
        chosen = [(q, k, nearest_pair(grid.pairs, q, k)) for _, _, q, k in self.pairs]
        clipped_q = sum(q > grid.pairs[i][0] for q, _, i in chosen)
        clipped_k = sum(k > grid.pairs[i][1] for _, k, i in chosen)
        most = max(sum(i == pair for _, _, i in chosen) for pair in range(len(grid.pairs)))
        return {
            "q_clipped": clipped_q / len(chosen),
            "k_clipped": clipped_k / len(chosen),
            "largest_bucket": most / len(chosen),
        }


def observe_scales(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    chunk_tokens: int,
    calibration: Calibration | None = None,
    key_offset: KeyOffset | None = None,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> ScaleObservations:
    """Runs the windows [W, T] through the model, dense, in chunks, and records every head's scales; absmax by default.

    With a `key_offset`, as `observe_key_offset` measures one, those of K are of k − offset.
    """
    pairs = []
    measure = RunningScales(calibration or Absmax(), key_offset)

    def observe(chunk: Chunk) -> None:
        pairs.extend((chunk.layer, head, *both) for head, both in enumerate(measure(chunk)))

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    return ScaleObservations(tuple(pairs), key_offset)


class RunningScales:
    """Scales of every head of a chunk, K's (less the key offset, if any) the largest since the prompt began."""

    def __init__(self, calibration: Calibration, key_offset: KeyOffset | None = None):
        self._calibration, self._offset = calibration, key_offset

    def __call__(self, chunk: Chunk) -> list[tuple[float, float]]:
        """(q_scale, k_scale) of each query head, of the chunk's q and of all keys so far."""
        name = f"scales by {self._calibration}" + ("" if self._offset is None else f", {self._offset}")
        largest = chunk.cache.derived(name, lambda: _LargestScales(self._calibration, self._offset, chunk.layer), chunk.k)
        k_scales = largest.scales[chunk.heads.kv]
        return list(zip(self._calibration.scales(chunk.q).tolist(), k_scales.tolist(), strict=True))


class _LargestScales:
    """The largest scale of each key head over all chunks so far."""

    def __init__(self, calibration: Calibration, key_offset: KeyOffset | None, layer: int):
        self._calibration, self.length, self.scales = calibration, 0, None
        self._offset, self._layer = key_offset, layer

    def extend(self, k: Tensor) -> None:
        if k.shape[1] > self.length:
            new = shifted(k[:, self.length :], self._offset, self._layer)
            scales = self._calibration.scales(new)
            self.scales = scales if self.scales is None else torch.maximum(self.scales, scales)
            self.length = k.shape[1]

    def crop(self, length: int) -> None:
        self.length, self.scales = 0, None  # as one chunk, from the first key


def scale_grid(observations: ScaleObservations, grid: Grid | None = None) -> ScaleGrid:
    """Static scales for Q and for K: 3 × 3 buckets by default, mean × 0.5, 1 and 2; with the key offset that K was less of."""
    grid = grid or Mean()
    q, k = ([pair[axis] for pair in observations.pairs] for axis in (2, 3))
    return ScaleGrid(grid.scales(q), grid.scales(k), grid.pattern, observations.key_offset)


def layer_grids(observations: ScaleObservations, grid: Grid | None = None) -> tuple[ScaleGrid, ...]:
    """The same for each layer by itself, [L]."""
    layers = 1 + max(pair[0] for pair in observations.pairs)
    return tuple(scale_grid(observations.of_layer(layer), grid) for layer in range(layers))
