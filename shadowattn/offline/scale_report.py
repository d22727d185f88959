"""What static scales do to the values they quantise, counted on calibration text: what a grid is chosen by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.observe import observe_prefill
from shadowattn.graphs.buckets import nearest_pair
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.graphs.symmetric_int8 import shifted
from shadowattn.offline.calibrations.absmax import Absmax
from shadowattn.offline.scales import RunningScales
from shadowattn.online.chunk import Chunk
from shadowattn.types import ScaleGrid


@dataclass(frozen=True)
class ScaleFit:
    """Shares over all layers, heads and chunks, online's choice of bucket being made for each.

    `clipped_heads`: measured absmax above the bucket's range. `zero`: values that become 0 though they are not.
    `saturated`: values beyond ±127 that are cut. `assigned[i]`: how many (layer, head, chunk) took bucket i, Q-major.
    """

    q_clipped_heads: float
    k_clipped_heads: float
    q_zero: float
    k_zero: float
    q_saturated: float
    k_saturated: float
    assigned: tuple[int, ...]


def report_scales(
    model: PreTrainedModel,
    windows: Tensor,
    grids: Mapping[str, ScaleGrid | tuple[ScaleGrid, ...]],
    *,
    chunk_tokens: int,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> dict[str, ScaleFit]:
    """How each grid, one for the model or one a layer, serves the windows [W, T]; streamed, only counts are kept.

    Keys are those less the grid's own key offset.
    """
    counts = {name: _Counts() for name in grids}

    def observe(chunk: Chunk) -> None:
        for name, choice in grids.items():
            grid = choice if isinstance(choice, ScaleGrid) else choice[chunk.layer]
            measured = RunningScales(Absmax(), grid.key_offset)(chunk)
            counts[name].add(grid, chunk.q, shifted(chunk.k, grid.key_offset, chunk.layer), measured)

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    return {name: count.fit() for name, count in counts.items()}


class _Counts:
    """Running sums over heads and chunks, for Q and for K."""

    def __init__(self):
        self.clipped, self.zero, self.saturated, self.values = ([0, 0] for _ in range(4))
        self.assigned: list[int] = []

    def add(self, grid: ScaleGrid, q: Tensor, k: Tensor, measured: list[tuple[float, float]]) -> None:
        self.assigned += [0] * (len(grid.pairs) - len(self.assigned))  # layers' grids may differ in size
        group = q.shape[0] // k.shape[0]
        chosen = [nearest_pair(grid.pairs, *scales) for scales in measured]
        for bucket in chosen:
            self.assigned[bucket] += 1
        buckets = torch.tensor([grid.pairs[bucket] for bucket in chosen], device=q.device)
        keys = k.repeat_interleave(group, 0)  # every query head quantises the keys by its own bucket
        for side, (x, scale) in enumerate(zip((q, keys), buckets.unbind(1), strict=True)):
            steps = x.float().abs() / scale[:, None, None]
            self.clipped[side] += sum(
                pair[side] > grid.pairs[bucket][side] for pair, bucket in zip(measured, chosen, strict=True)
            )
            self.zero[side] += int(((steps <= 0.5) & (steps > 0)).sum())
            self.saturated[side] += int((steps > INT8_MAX + 0.5).sum())
            self.values[side] += steps.numel()

    def fit(self) -> ScaleFit:
        heads = max(1, sum(self.assigned))
        q, k = range(2)
        return ScaleFit(
            q_clipped_heads=self.clipped[q] / heads,
            k_clipped_heads=self.clipped[k] / heads,
            q_zero=self.zero[q] / max(1, self.values[q]),
            k_zero=self.zero[k] / max(1, self.values[k]),
            q_saturated=self.saturated[q] / max(1, self.values[q]),
            k_saturated=self.saturated[k] / max(1, self.values[k]),
            assigned=tuple(self.assigned),
        )
