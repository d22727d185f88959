"""Ways to take a head out of a model, wholly or in part: what it puts out instead.

An ablation is a function of one head's q, k and v, [B, T, D] after RoPE, and the score's scale; it returns [B, T, D]. The fast
measurement (`shared_ablations`) calls it beside the output projection, the plain one (`Ablated`) inside the attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.kernels import choose
from shadowattn.kernels.torch_kernels import dense
from shadowattn.online.attention import Request
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages

Ablation = Callable[[Tensor, Tensor, Tensor, float], Tensor]

_ARTIFACT_CHUNK = 32
_TOPK_ROWS = 256  # rows of scores that exist at a time


def zero(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The head puts out zero: what the paper's text says (section 3.2)."""
    return torch.zeros_like(v)


def uniform(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The head becomes a causal average: what the artifact's code does when it gives a head a retention of 0.

    Of every chunk of 32 rows its threshold keeps the largest score alone. The row that holds it attends to that one
    key; in all others every logit is shifted by the same −3.4e38, so that the softmax is uniform over the prefix.
    """
    q, k, out = q.float(), k.float(), v.float()
    v, rows = out, q.shape[1]
    at = torch.arange(rows, device=q.device)
    out = v.cumsum(1) / (at[:, None] + 1)
    for start in range(0, rows, _ARTIFACT_CHUNK):
        chunk = slice(start, min(start + _ARTIFACT_CHUNK, rows))
        scores = q[:, chunk] @ k[:, : chunk.stop].transpose(1, 2)
        future = at[: chunk.stop] > at[chunk, None]
        scores = scores.masked_fill(future, -torch.inf)
        survives = scores == scores.amax((1, 2), keepdim=True)
        # Ties survive together and, having equal scores, share the weight evenly.
        weights = survives / survives.sum(-1, keepdim=True).clamp(min=1)
        hit = survives.any(-1, keepdim=True)
        out[:, chunk] = torch.where(hit, weights.to(v.dtype) @ v[:, : chunk.stop], out[:, chunk])
    return out


@dataclass(frozen=True)
class TopK:
    """The head keeps the exact top `retention` of each row's visible keys: not gone, but sparse."""

    retention: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = q.float(), k.float(), v.float()
        out = torch.empty_like(v)
        kernels = choose("auto", head_dim=q.shape[2], dtype=q.dtype, device=q.device)
        whole = Chunk.of(q, k, v, retention=self.retention, scale=scale)  # a window is a head with keys of its own
        for rows, chunk in whole.split(_TOPK_ROWS):
            stages = Stages(chunk, Parts(Oracle(), Rule(), kernels))
            every = slice(0, len(q))
            out[:, rows] = stages.attend(stages.select(Oracle().scores(chunk), every), every)
        return out


BY_NAME: dict[str, Ablation] = {"zero": zero, "uniform": uniform}


def head_variants(ablated: Sequence[tuple[int, Ablation]]) -> Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]:
    """One variant of a layer's attention output for each (head, ablation), as `models.layerwise` takes them."""

    def variants(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> Tensor:
        _, heads, _, dim = q.shape
        group = heads // k.shape[1]
        changed = out.expand(len(ablated), *out.shape).clone()
        for index, (head, ablation) in enumerate(ablated):
            columns = slice(head * dim, (head + 1) * dim)
            changed[index, ..., columns] = ablation(q[:, head], k[:, head // group], v[:, head // group], scale)
        return changed

    return variants


@dataclass(frozen=True)
class Ablated:
    """One head ablated in a forward pass of its own, as an attention for `models.replace_attention`."""

    layer: int
    head: int
    ablation: Ablation

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request: Request) -> Tensor:
        out = dense(q, k, v, causal_offset=0, scale=scale)
        if layer == self.layer:
            key_head = self.head // (q.shape[1] // k.shape[1])
            out[:, self.head] = self.ablation(q[:, self.head], k[:, key_head], v[:, key_head], scale).to(q.dtype)
        return out
