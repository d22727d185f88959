"""Loss of held-out text, every token predicted from a prefill of what stands before it in its window."""

from collections.abc import Callable, Iterable

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
    return losses_of(lambda window: prefill_chunks(model, window, chunk_tokens=chunk_tokens), progress(windows))


def losses_of(prefill: Callable[[Tensor], Iterable[tuple[slice, Tensor]]], windows: Iterable[Tensor]) -> Tensor:
    """The same for what yields (positions, logits [chunk, V]) for each chunk of a window int64 [T], as an engine does."""
    return torch.stack([_window_loss(prefill, window) for window in windows])


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


def _window_loss(prefill: Callable[[Tensor], Iterable[tuple[slice, Tensor]]], window: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for chunk, logits in prefill(window):
        targets = window[chunk.start + 1 : chunk.stop + 1].to(logits.device)
        total += torch.nn.functional.cross_entropy(logits[: len(targets)].float(), targets, reduction="sum").cpu()
    return total / (len(window) - 1)
