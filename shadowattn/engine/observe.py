"""A dense prefill that shows what every layer's attention is given, chunk by chunk: what calibration and measures look at."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.prefill import prefill_chunks
from shadowattn.kernels import choose
from shadowattn.models.registry import replace_attention
from shadowattn.online.attention import Request
from shadowattn.online.chunk import Chunk


def observe_prefill(
    model: PreTrainedModel,
    windows: Tensor,
    observe: Callable[[Chunk], None],
    *,
    chunk_tokens: int,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> None:
    """Runs the windows int64 [W, T] through the model, each a prompt of its own, dense and without gradients.

    `observe` is called for every layer of every chunk of `chunk_tokens` rows, with all keys so far and with the cache of what it
    derived of them. Raises `InputError` on a model with sliding windows.
    """

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request: Request) -> Tensor:
        chunk = Chunk.of(q[0], k[0], v[0], scale=scale, layer=layer, cache=request.caches[0])
        observe(chunk)
        kernels = choose("auto", head_dim=q.shape[3], dtype=q.dtype, device=q.device)
        return kernels.dense(chunk.q, chunk.k, chunk.v, chunk.heads, causal_offset=chunk.first_position, scale=scale)[None]

    with replace_attention(model, attention), torch.no_grad():
        for window in progress(windows):
            for _ in prefill_chunks(model, window, chunk_tokens=chunk_tokens):
                pass
