"""The largest magnitudes of Q, K, V and q·k on calibration text: what NPU-Full's static scales are made of."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.observe import observe_prefill
from shadowattn.graphs.symmetric_int8 import shifted
from shadowattn.models.shape import fingerprint, model_shape
from shadowattn.online.chunk import Chunk
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

    def prepared(chunk: Chunk) -> Chunk:
        return replace(chunk, k=shifted(chunk.k, key_offset, chunk.layer))

    ranges = observe_prepared_ranges(model, windows, {"": prepared}, chunk_tokens=chunk_tokens, progress=progress)
    return replace(ranges[""], key_offset=key_offset)


def observe_prepared_ranges(
    model: PreTrainedModel,
    windows: Tensor,
    prepared: Mapping[str, Callable[[Chunk], Chunk]],
    *,
    chunk_tokens: int,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> dict[str, AttentionRanges]:
    """The same after each of several changes of Q and K, by name, in one run of the model."""
    shape = model_shape(model)
    counts = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads, "scores": shape.heads}
    largest = {
        name: {key: torch.zeros(shape.layers, heads, device=model.device) for key, heads in counts.items()} for name in prepared
    }

    def observe(chunk: Chunk) -> None:
        for name, prepare in prepared.items():
            for key, x in _observed(prepare(chunk)).items():
                table = largest[name][key]
                table[chunk.layer] = torch.maximum(table[chunk.layer], x.abs().amax((1, 2)))

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    digest = fingerprint(model)
    return {
        name: AttentionRanges(**{key: tuple(map(tuple, table.tolist())) for key, table in tables.items()}, fingerprint=digest)
        for name, tables in largest.items()
    }


def _observed(chunk: Chunk) -> dict[str, Tensor]:
    """What the chunk adds: its own rows of Q, K and V, and q·k [H, Q, K], 0 for keys after a row; float32."""
    q, k, v = chunk.q.float(), chunk.k.float(), chunk.v.float()
    rows = q.shape[1]
    hidden = torch.arange(chunk.keys, device=k.device) > chunk.positions[:, None]
    scores = (q.reshape(len(k), -1, q.shape[2]) @ k.mT).view(len(q), rows, -1).masked_fill_(hidden, 0.0)
    return {"q": q, "k": k[:, -rows:], "v": v[:, -rows:], "scores": scores}
