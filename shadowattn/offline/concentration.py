"""How many keys each head really looks at, in dense attention on calibration text: why a vital head may need only one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.prefill import prefill_chunks
from shadowattn.models.shape import model_shape
from shadowattn.offline.scales import watch_attention
from shadowattn.online.attention import Request


@dataclass(frozen=True)
class Concentration:
    """Means over query rows, [L][H]: the largest attention weight, and exp of the weights' entropy."""

    top_weight: tuple[tuple[float, ...], ...]
    effective_keys: tuple[tuple[float, ...], ...]


def measure_concentration(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    chunk_tokens: int = 128,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> Concentration:
    """Runs the windows [W, T] through the dense model in chunks; the weights of one chunk and layer exist at a time."""
    shape, rows = model_shape(model), 0
    top = torch.zeros(shape.layers, shape.heads, dtype=torch.float64, device=model.device)
    keys = torch.zeros_like(top)

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request: Request) -> None:
        nonlocal rows
        _, heads, count, _ = q.shape
        key = torch.arange(k.shape[2], device=k.device)
        spread = k[0].float().repeat_interleave(heads // k.shape[1], 0)
        logits = q[0].float() @ spread.transpose(1, 2) * scale
        logits = logits.masked_fill(key > key[-count:, None], -torch.inf)
        weights = torch.softmax(logits, -1)
        top[layer] += weights.amax(-1).sum(1).double()
        keys[layer] += torch.special.entr(weights).sum(-1).exp().sum(1).double()
        rows += count if layer == 0 else 0

    with watch_attention(model, observe):
        for window in progress(windows):
            for _ in prefill_chunks(model, window, chunk_tokens=chunk_tokens):
                pass
    tables = [tuple(map(tuple, (total / rows).tolist())) for total in (top, keys)]
    return Concentration(*tables)
