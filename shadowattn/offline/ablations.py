"""Two ways to take a head out of a model, as attentions for `models.replace_attention`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.kernels.torch_kernels import dense

_ARTIFACT_CHUNK = 32


@dataclass(frozen=True)
class ZeroHead:
    """The head puts out zero: what the paper's text says (section 3.2)."""

    layer: int
    head: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = dense(q, k, v, causal_offset=0, scale=scale)
        if layer == self.layer:
            out[:, self.head] = 0
        return out


@dataclass(frozen=True)
class UniformHead:
    """The head becomes a causal average: what the artifact's code does when it gives a head a retention of 0.

    Of every chunk of 32 rows its threshold keeps the largest score alone. The row that holds it attends to that one
    key; in all others every logit is shifted by the same −3.4e38, so that the softmax is uniform over the prefix.
    """

    layer: int
    head: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = dense(q, k, v, causal_offset=0, scale=scale)
        if layer == self.layer:
            kv_head = self.head // (q.shape[1] // k.shape[1])
            out[:, self.head] = _ablated(q[:, self.head].float(), k[:, kv_head].float(), v[:, kv_head].float()).to(q.dtype)
        return out


def _ablated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [batch, rows, D] of one head → its output when only each chunk's largest score survives."""
    rows = q.shape[1]
    out = v.cumsum(1) / torch.arange(1, rows + 1)[:, None]
    for start in range(0, rows, _ARTIFACT_CHUNK):
        chunk = slice(start, min(start + _ARTIFACT_CHUNK, rows))
        scores = q[:, chunk] @ k[:, : chunk.stop].transpose(1, 2)
        future = torch.arange(chunk.stop) > torch.arange(rows)[chunk, None]
        scores = scores.masked_fill(future, -torch.inf)
        survives = scores == scores.amax((1, 2), keepdim=True)
        # Ties survive together and, having equal scores, share the weight evenly.
        weights = survives / survives.sum(-1, keepdim=True).clamp(min=1)
        hit = survives.any(-1, keepdim=True)
        out[:, chunk] = torch.where(hit, weights.to(v.dtype) @ v[:, : chunk.stop], out[:, chunk])
    return out


BY_NAME = {"zero": ZeroHead, "uniform": UniformHead}
