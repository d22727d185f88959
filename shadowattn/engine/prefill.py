"""Chunked prefill: a prompt goes through the model a chunk at a time, so memory grows with tokens × chunk."""

from collections.abc import Iterator
from inspect import signature

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.errors import InputError
from shadowattn.models.requests import prompt

# In transformers 5.23 their recurrent layers use the state in the cache for a single token only. `tests/models/families.py` runs
# every family in chunks and in one piece.
_BEGIN_ANEW = frozenset({"bamba", "jamba"})


@torch.no_grad()
def prefill_chunks(
    model: PreTrainedModel, tokens: Tensor, *, chunk_tokens: int, last: int | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yields (positions, logits [chunk, V]) for each chunk of one prompt, int64 [T]; logits are where the model is.

    `last`: those of the prompt's last positions alone, so many; the model's head is then spared the others.

    Raises `InputError` on a prompt of several chunks for a model that cannot go on from its cache: before the first chunk where
    it is of a family known for it, before the second where it returns no cache.
    """
    check_chunks(model, tokens, chunk_tokens=chunk_tokens)
    tokens, cache = tokens.to(model.device), None
    first = 0 if last is None else len(tokens) - last
    spares = last is not None and "logits_to_keep" in signature(model.forward).parameters
    for start in range(0, len(tokens), chunk_tokens):
        if start and cache is None:
            raise _in_one_piece(model, "it returns no cache")
        chunk = slice(start, min(start + chunk_tokens, len(tokens)))
        asked = slice(max(chunk.start, first), chunk.stop)
        count = max(0, asked.stop - asked.start)
        keep = {"logits_to_keep": max(1, count)} if spares else {}  # 0 would mean all of them
        with prompt():  # also a last chunk of one token, which would otherwise be taken for a decoding step
            out = model(input_ids=tokens[None, chunk], past_key_values=cache, use_cache=True, **keep)
        cache = out.get("past_key_values")  # of the model's own kind
        if count:
            yield asked, out.logits[0, -count:]


def check_chunks(model: PreTrainedModel, tokens: Tensor, *, chunk_tokens: int) -> None:
    """Raises `InputError` on a prompt, int64 [T], of several chunks for a family of models known to begin anew with each."""
    if len(tokens) > chunk_tokens and model.config.get_text_config().model_type in _BEGIN_ANEW:
        raise _in_one_piece(model, "its recurrent layers begin anew with every chunk")


def _in_one_piece(model: PreTrainedModel, reason: str) -> InputError:
    return InputError(
        f"{type(model).__name__}: {reason}, so a prompt has to go through it in one piece; give chunks as long as the prompt "
        "(chunk_tokens), or use another model"
    )
