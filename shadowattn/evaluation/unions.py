"""How many keys the rows of a tile keep together, beside what one row keeps: a tile reads these instead of each row's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.observe import observe_prefill
from shadowattn.kernels import Kernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator
from shadowattn.online.selection import Rule
from shadowattn.types import Selection


@dataclass(frozen=True)
class UnionSizes:
    """Of one window, for an estimate, a retention and a number of rows: means over the tiles of every head, [L][H].

    `ratio`: keys of the union over the mean length of the tile's lists; from 1, one list for all, to the number of rows. `share`:
    keys of the union over the keys that the tile's last row sees.
    """

    ratio: list[list[float]]
    share: list[list[float]]


def observe_last_rows(model: PreTrainedModel, window: Tensor, rows: int, observe: Callable[[Chunk], None]) -> None:
    """Runs a window int64 [T] through the model, dense; `observe` gets the last `rows` rows of every layer. `rows` divides T."""

    def observe_last(chunk: Chunk) -> None:
        if chunk.keys == len(window):
            observe(chunk)

    observe_prefill(model, window[None], observe_last, chunk_tokens=rows)


def measure_unions(
    model: PreTrainedModel,
    window: Tensor,
    rows: int,
    estimates: Mapping[str, Estimator],
    retentions: Sequence[float],
    tiles: Sequence[int],
    kernels: Kernels,
) -> dict[tuple[str, float, int], UnionSizes]:
    """Sizes by estimate, retention and rows of a tile, of the last `rows` rows of a window, a multiple of every tile's."""
    sizes = {(name, at, tile): UnionSizes([], []) for name in estimates for at in retentions for tile in tiles}

    def observe(chunk: Chunk) -> None:
        for name, estimate in estimates.items():
            with estimate.use():
                scores = estimate.scores(chunk)
            for at in retentions:
                selection = row_lists(chunk, scores, at, kernels)
                for tile in tiles:
                    ratio, share = _sizes(selection, tile, kernels)
                    sizes[name, at, tile].ratio.append(ratio.mean(1).tolist())
                    sizes[name, at, tile].share.append(share.mean(1).tolist())

    observe_last_rows(model, window, rows, observe)
    return sizes


def row_lists(chunk: Chunk, scores: Tensor, retention: float, kernels: Kernels) -> Selection:
    """The list of every row by scores [H, Q, K], all heads at one retention."""
    return kernels.select(scores, Rule().lists(torch.full((len(chunk.heads),), retention, dtype=torch.float64), chunk.positions))


def _sizes(selection: Selection, rows: int, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """`ratio` and `share` of every tile, float64 [H, B]."""
    unions = kernels.unite(selection, rows).counts.double()
    lengths = selection.counts.unflatten(1, (-1, rows)).double().mean(2)
    return unions / lengths, unions / (selection.positions[rows - 1 :: rows] + 1)
