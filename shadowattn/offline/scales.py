"""INT8 scales: observed on calibration text, summed up in a small static grid (section 3.3).

A scale is absmax / 127 after RoPE, of one head: of Q over the rows of a chunk, of K over all keys so far (which makes it
monotone), as the estimator measures them online.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.evaluation.perplexity import prefill_chunks
from shadowattn.graphs.buckets import nearest_pair
from shadowattn.kernels.torch_kernels import dense
from shadowattn.models.patch import replace_attention
from shadowattn.online.estimators.int8 import absmax_scales
from shadowattn.types import ScaleGrid


@dataclass(frozen=True)
class ScaleObservations:
    """Pairs of scales, one for each layer, query head and chunk seen: (layer, head, q_scale, k_scale)."""

    pairs: tuple[tuple[int, int, float, float], ...]

    def mean(self) -> tuple[float, float]:
        q, k = (sum(pair[axis] for pair in self.pairs) / len(self.pairs) for axis in (2, 3))
        return q, k

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
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> ScaleObservations:
    """Runs the windows [W, T] through the model, dense, in chunks, and records every head's scales."""
    pairs = []

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        group = q.shape[1] // k.shape[1]
        q_scales, k_scales = absmax_scales(q[0]).tolist(), absmax_scales(k[0]).tolist()
        pairs.extend((layer, head, q_scales[head], k_scales[head // group]) for head in range(q.shape[1]))
        return dense(q, k, v, causal_offset=k.shape[2] - q.shape[2], scale=scale)

    with replace_attention(model, observe), torch.no_grad():
        for window in progress(windows):
            for _ in prefill_chunks(model, window, chunk_tokens=chunk_tokens):
                pass
    return ScaleObservations(tuple(pairs))


def scale_grid(observations: ScaleObservations, multipliers: tuple[float, ...] = (0.5, 1.0, 2.0)) -> ScaleGrid:
    """Mean scale × multipliers, for Q and for K: 3 × 3 buckets by default (step σ = 0.5)."""
    q, k = observations.mean()
    return ScaleGrid(tuple(q * m for m in multipliers), tuple(k * m for m in multipliers))
