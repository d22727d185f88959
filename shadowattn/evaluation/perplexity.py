"""Loss of held-out text, every token predicted from a prefill of what stands before it in its window."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.prefill import prefill_chunks


def window_losses(
    model: PreTrainedModel, windows: Tensor, *, chunk_tokens: int, progress: Callable[[Tensor], Iterable[Tensor]] = iter
) -> Tensor:
    """Mean loss in nat of each window's tokens but its first, float64 [W], for windows int64 [W, T].

    Perplexity is exp of their mean: all windows have the same length.
    """
    return token_losses(model, windows, chunk_tokens=chunk_tokens, progress=progress).mean(1)


def token_losses(
    model: PreTrainedModel, windows: Tensor, *, chunk_tokens: int, progress: Callable[[Tensor], Iterable[Tensor]] = iter
) -> Tensor:
    """Loss in nat of every token but each window's first, float64 [W, T − 1], for windows int64 [W, T].

    Column i is what row i says of the next token; the row sees i + 1 keys.
    """
    prefill = partial(prefill_chunks, model, chunk_tokens=chunk_tokens)
    return torch.stack([_token_losses(prefill, window) for window in progress(windows)])


def losses_of(prefill: Callable[[Tensor], Iterable[tuple[slice, Tensor]]], windows: Iterable[Tensor]) -> Tensor:
    """As `window_losses`, for what yields (positions, logits [chunk, V]) for each chunk of a window int64 [T], in order."""
    return torch.stack([_token_losses(prefill, window).mean() for window in windows])


def by_octave(losses: Tensor) -> dict[int, Tensor]:
    """Mean losses, float64 [W], of the rows that see 1 to 15, 16 to 31, 32 to 63 keys and so on, by the first of these numbers.

    For `token_losses` [W, T − 1].
    """
    rows = losses.shape[1]
    ends = [0, *(end - 1 for end in (16 << octave for octave in range(rows.bit_length())) if end - 1 < rows), rows]
    return {first + 1: losses[:, first:end].mean(1) for first, end in pairwise(ends)}


def batch_losses(model: PreTrainedModel, windows: Tensor, *, batch: int) -> Tensor:
    """The same for many short windows at once, each in one forward pass: what the ablations use."""
    losses = []
    for ids in windows.to(model.device).split(batch):
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        losses.append(flat.view(len(ids), -1).double().mean(1))
    return torch.cat(losses).cpu()


def unigram_loss(windows: Tensor) -> float:
    """Loss in nat of a model that knows only how often each token of these windows occurs: the floor for `dense`.

    A model not clearly below it has learnt nothing here that attention could lose.
    """
    counts = torch.bincount(windows.flatten()).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())


def chunk_losses(window: Tensor, chunk: slice, logits: Tensor) -> Tensor:
    """Losses float64 of the tokens of a window int64 [T] that a chunk's rows predict, of logits [chunk, V], where these are."""
    targets = window[chunk.start + 1 : chunk.stop + 1].to(logits.device)
    return torch.nn.functional.cross_entropy(logits[: len(targets)].float(), targets, reduction="none").double()


def _token_losses(prefill: Callable[[Tensor], Iterable[tuple[slice, Tensor]]], window: Tensor) -> Tensor:
    return torch.cat([chunk_losses(window, *chunk) for chunk in prefill(window)]).cpu()
