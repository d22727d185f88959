"""The largest magnitudes of Q, K, V and q·k on calibration text: what NPU-Full's static scales are made of."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.evaluation.perplexity import prefill_chunks
from shadowattn.graphs.symmetric_int8 import shifted
from shadowattn.models.shape import fingerprint, model_shape
from shadowattn.offline.scales import watch_attention
from shadowattn.online.attention import Request
from shadowattn.online.full_int8 import AttentionRanges
from shadowattn.types import KeyOffset


def observe_attention_ranges(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    chunk_tokens: int,
    key_offset: KeyOffset | None = None,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> AttentionRanges:
    """Runs the windows [W, T] through the model, dense, in chunks, and keeps every head's largest magnitudes.

    Of a score only where the row sees the key. With a `key_offset`, K and the scores are those of k − offset. Raises
    `InputError` on a model with sliding windows.
    """
    shape = model_shape(model)
    counts = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads, "scores": shape.heads}
    largest = {name: torch.zeros(shape.layers, heads, device=model.device) for name, heads in counts.items()}

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request: Request) -> None:
        q, k, v = (x.float() for x in (q[0], shifted(k[0], key_offset, layer), v[0]))
        rows = q.shape[1]
        found = {"q": q, "k": k[:, -rows:], "v": v[:, -rows:], "scores": _visible_scores(q, k)}
        for name, x in found.items():
            largest[name][layer] = torch.maximum(largest[name][layer], x.abs().amax((1, 2)))

    with watch_attention(model, observe):
        for window in progress(windows):
            for _ in prefill_chunks(model, window, chunk_tokens=chunk_tokens):
                pass
    tables = {name: tuple(map(tuple, table.tolist())) for name, table in largest.items()}
    return AttentionRanges(**tables, fingerprint=fingerprint(model), key_offset=key_offset)


def _visible_scores(q: Tensor, k: Tensor) -> Tensor:
    """q·k [H, Q, K] of the last rows, 0 for keys after a row."""
    (heads, rows, dim), (groups, keys, _) = q.shape, k.shape
    scores = (q.reshape(groups, -1, dim) @ k.mT).view(heads, rows, keys)
    key = torch.arange(keys, device=k.device)
    return scores.masked_fill_(key > key[keys - rows :, None], 0.0)
