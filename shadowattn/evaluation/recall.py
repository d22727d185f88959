"""How many of the keys that exact scores rank highest an estimate ranks highest too, head by head (the paper's table 4, Fig. 14).

Two granularities. `row`: each query row has its own top-k, keep = max(1, ceil(retention × visible)), as on the device. `pooled`:
the rows share one budget for all their visible keys, keep = int(retention × visible in all) + 1, as in the authors' offline tool.
The rows are some of each chunk, 32 as there unless told otherwise, evenly spread over it (`sampled_rows`): neighbours would be
much alike.
The paper does not say which of them its table means. Ties go to the lower row, then to the lower index.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.budget import keep_counts
from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator, check_scores
from shadowattn.online.estimators.base import check_place

GRANULARITIES = ("row", "pooled")
SAMPLED_ROWS = 32  # of each chunk, as in the authors' tool, unless told otherwise
# What the authors' validation tool asks for.
TARGET_MEAN, TARGET_WORST_HEAD = 0.90, 0.50


@dataclass(frozen=True)
class Recall:
    """What one way to estimate found. `heads[granularity][i]` is [L][H] at the i-th retention; `figures` are of the estimate."""

    heads: Mapping[str, Sequence[Sequence[Sequence[float]]]]
    figures: Mapping[str, float]

    def mean(self, granularity: str, at: int) -> float:
        """Mean over heads at the retention of index `at`."""
        values = [value for layer in self.heads[granularity][at] for value in layer]
        return sum(values) / len(values)

    def worst(self, granularity: str, at: int) -> tuple[float, int, int]:
        """(recall, layer, head) of the head that is served worst."""
        table = self.heads[granularity][at]
        return min((value, layer, head) for layer, row in enumerate(table) for head, value in enumerate(row))

    def passes(self, at: int) -> bool:
        """The check of the authors' tool, per row: mean recall at least 0.90, worst head at least 0.50."""
        return self.mean("row", at) >= TARGET_MEAN and self.worst("row", at)[0] >= TARGET_WORST_HEAD


def measure_recall(
    model: PreTrainedModel,
    windows: Tensor,
    estimates: Mapping[str, Estimator],
    retentions: Sequence[float],
    *,
    chunk_tokens: int,
    sampled: int = SAMPLED_ROWS,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> dict[str, Recall]:
    """Runs the windows [W, T] through the model, dense, and ranks every chunk's keys by every estimate.

    Of each chunk `sampled` rows are looked at, evenly spread over it, and of a shorter chunk at a window's end none; scales are
    still measured over the whole chunk, as online.
    """
    if chunk_tokens < sampled:
        raise InputError(
            f"graphs.chunk_tokens: expected at least {sampled} rows, which recall is measured on, got {chunk_tokens}"
        )
    if windows.shape[1] < sampled:
        raise InputError(f"expected windows of at least {sampled} tokens, which recall is measured on, got {windows.shape[1]}")
    for estimate in estimates.values():
        check_place(model.device, type(estimate))
    wanted = torch.tensor(list(retentions), dtype=torch.float64, device=model.device)
    counts = {name: _Counts(len(retentions)) for name in estimates}

    def observe(chunk: Chunk) -> None:
        if chunk.q.shape[1] < sampled:
            return
        rows = sampled_rows(chunk.q.shape[1], sampled)
        visible = 1 + chunk.positions[rows]
        chunk = replace(chunk.asking(Tensor.float, chunk.positions), k=chunk.k.float())
        exact = chunk.q[:, rows] @ chunk.k[chunk.heads.kv].mT
        best = _Ranking(exact, visible, wanted)
        for name, estimate in estimates.items():
            with estimate.use():
                scores = check_scores(estimate.scores(chunk), estimate, chunk)[:, rows].float()
            figures = {"score_correlation": _correlation(exact, scores, visible)} | estimate.figures(chunk, scores, visible)
            counts[name].add(chunk.layer, best.found_by(scores), figures)

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    return {name: count.recall() for name, count in counts.items()}


def sampled_rows(chunk_rows: int, sampled: int = SAMPLED_ROWS) -> slice:
    """Which rows of a chunk recall is measured on: so many at equal distances, the middle ones of as many equal parts."""
    step = chunk_rows // sampled
    first = (chunk_rows - step * (sampled - 1)) // 2
    return slice(first, first + step * (sampled - 1) + 1, step)


def measured_rows(window_tokens: int, chunk_tokens: int, sampled: int = SAMPLED_ROWS) -> int:
    """How many rows of one window recall is measured on."""
    whole, rest = divmod(window_tokens, chunk_tokens)
    return sampled * (whole + (rest >= sampled))


def top_keys(scores: Tensor, positions: Tensor, retention: float) -> Tensor:
    """Which keys each row keeps, bool, of scores [..., Q, K]: the best of those it sees; ties to the lower index."""
    keys = scores.shape[-1]
    later = torch.arange(keys, device=scores.device) > positions[:, None]
    rank = scores.masked_fill(later, -torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    kept = keep_counts(torch.tensor([retention], dtype=torch.float64), positions + 1)[0]
    return (rank < kept[:, None]) & ~later


def _correlation(exact: Tensor, scores: Tensor, visible: Tensor) -> float:
    """Of the scores with the exact ones, mean over heads: what is left of them but for a scale of each head's own."""
    seen = torch.arange(exact.shape[2], device=exact.device) < visible[:, None]
    pairs = [torch.stack([a[seen], b[seen]]).double() for a, b in zip(exact, scores, strict=True)]
    return float(torch.stack([torch.corrcoef(pair)[0, 1] for pair in pairs]).nanmean())


class _Ranking:
    """What the exact scores [H, rows, K] of one chunk keep, which others are compared with."""

    def __init__(self, exact: Tensor, visible: Tensor, retentions: Tensor):
        self._hidden = torch.arange(exact.shape[2], device=exact.device) >= visible[:, None]
        pooled = (1 + (retentions * int(visible.sum())).long()).clamp(max=int(visible.sum()))
        self._keep = {"row": keep_counts(retentions, visible)[:, None], "pooled": pooled[:, None, None]}  # [R, 1, rows or 1]
        self._kept = self._best(exact)

    def found_by(self, scores: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """By granularity: keys found and keys wanted, [R, H]."""
        counts = {}
        for name, kept in self._best(scores).items():
            found = kept.logical_and_(self._kept[name]).flatten(2).sum(2)
            counts[name] = found, self._keep[name].flatten(1).sum(1)[:, None].expand_as(found)
        return counts

    def _best(self, scores: Tensor) -> dict[str, Tensor]:
        """Which keys are kept, bool [R, H, rows or 1, keys]."""
        scores = scores.masked_fill(self._hidden, -torch.inf)
        return {name: best(x, self._keep[name]) for name, x in (("row", scores), ("pooled", scores.flatten(1)[:, None]))}


def best(scores: Tensor, keep: Tensor) -> Tensor:
    """The `keep` [R, 1, L] largest of scores [H, L, K], ties to the lower index, as bool [R, H, L, K].

    Values alone are sorted, which on the CPU numpy does many times faster than torch sorts them with their places.
    """
    values = torch.from_numpy(np.sort(scores.numpy(), axis=-1)) if scores.device.type == "cpu" else scores.sort(-1).values
    places = (scores.shape[-1] - keep).expand(-1, len(scores), -1)  # of the least that is kept, in ascending order
    threshold = values.gather(-1, places.permute(1, 2, 0)).permute(2, 0, 1)[..., None]
    kept = scores >= threshold
    crowded = kept.count_nonzero(-1) > keep  # where not all that tie with the least find room
    at, head, row = crowded.nonzero().unbind(1)
    full, least = scores[head, row], threshold[at, head, row]
    above, tied = full > least, full == least
    room = keep[at, 0, row][:, None] - above.count_nonzero(-1)[:, None]
    kept[at, head, row] = above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))
    return kept


class _Counts:
    """Running sums over chunks: recall is over all keys wanted, not a mean of chunks' recalls."""

    def __init__(self, retentions: int):
        self._retentions = retentions
        self._found: dict[str, dict[int, list[Tensor]]] = {name: {} for name in GRANULARITIES}
        self._figures: dict[str, list[float]] = {}

    def add(self, layer: int, counts: dict[str, tuple[Tensor, Tensor]], figures: dict[str, float]) -> None:
        for name, (hits, wanted) in counts.items():
            sums = self._found[name].setdefault(layer, [torch.zeros_like(hits), torch.zeros_like(wanted)])
            sums[0] += hits
            sums[1] += wanted
        for name, value in figures.items():
            self._figures.setdefault(name, []).append(value)

    def recall(self) -> Recall:
        heads = {
            name: [
                [(layers[layer][0][at] / layers[layer][1][at]).tolist() for layer in sorted(layers)]
                for at in range(self._retentions)
            ]
            for name, layers in self._found.items()
        }
        return Recall(heads, {name: sum(values) / len(values) for name, values in self._figures.items()})
