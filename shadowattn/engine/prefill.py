"""Chunked prefill: a prompt goes through the model a chunk at a time, so memory grows with tokens × chunk."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@torch.no_grad()
def prefill_chunks(model: PreTrainedModel, tokens: Tensor, *, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields (positions, logits [chunk, V]) for each chunk of one prompt, int64 [T]."""
    cache = DynamicCache(config=model.config)
    for chunk in chunk_slices(len(tokens), chunk_tokens):
        out = model(input_ids=tokens[None, chunk], past_key_values=cache, use_cache=True)
        yield chunk, out.logits[0]


def chunk_slices(tokens: int, chunk_tokens: int) -> list[slice]:
    """Slices of `chunk_tokens`; a single token left over joins the chunk before it, since one row would look like decode."""
    starts = list(range(0, tokens, chunk_tokens))
    if len(starts) > 1 and tokens - starts[-1] == 1:
        starts.pop()
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], tokens], strict=True)]
