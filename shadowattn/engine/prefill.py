"""Chunked prefill: a prompt goes through the model a chunk at a time, so memory grows with tokens × chunk."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from shadowattn.models.requests import prompt


@torch.no_grad()
def prefill_chunks(model: PreTrainedModel, tokens: Tensor, *, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields (positions, logits [chunk, V]) for each chunk of one prompt, int64 [T]; logits are where the model is."""
    tokens, cache = tokens.to(model.device), DynamicCache(config=model.config)
    for start in range(0, len(tokens), chunk_tokens):
        chunk = slice(start, min(start + chunk_tokens, len(tokens)))
        with prompt():  # also a last chunk of one token, which would otherwise be taken for a decoding step
            out = model(input_ids=tokens[None, chunk], past_key_values=cache, use_cache=True)
        yield chunk, out.logits[0]
