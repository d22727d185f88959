"""How many keys each head really looks at, in dense attention on calibration text: why a vital head may need only one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.observe import observe_prefill
from shadowattn.models.shape import model_shape
from shadowattn.online.chunk import Chunk


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

    def observe(chunk: Chunk) -> None:
        nonlocal rows
        key = torch.arange(chunk.keys, device=chunk.k.device)
        logits = chunk.q.float() @ chunk.k.float()[chunk.heads.kv].mT * chunk.scale
        weights = torch.softmax(logits.masked_fill(key > chunk.positions[:, None], -torch.inf), -1)
        top[chunk.layer] += weights.amax(-1).sum(1).double()
        keys[chunk.layer] += torch.special.entr(weights).sum(-1).exp().sum(1).double()
        rows += chunk.q.shape[1] if chunk.layer == 0 else 0

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    tables = [tuple(map(tuple, (total / rows).tolist())) for total in (top, keys)]
    return Concentration(*tables)
