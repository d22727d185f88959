"""How far a method moves what the model says next: the divergence of its next-token distribution from dense attention's."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.prefill import prefill_chunks
from shadowattn.evaluation.perplexity import chunk_losses


class DenseLogits:
    """The logits of the model as it is on some windows [W, T], each computed when it is first asked for and kept in memory."""

    def __init__(self, model: PreTrainedModel, windows: Tensor, *, chunk_tokens: int):
        self._model, self._windows, self._chunk_tokens = model, windows, chunk_tokens
        self._kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        """Logits [T, V] of one window, in the model's dtype. Not inside a context that replaces the model's attention."""
        if index not in self._kept:
            chunks = prefill_chunks(self._model, self._windows[index], chunk_tokens=self._chunk_tokens)
            self._kept[index] = torch.cat([logits for _, logits in chunks])
        return self._kept[index]


def window_divergences(
    model: PreTrainedModel, windows: Tensor, dense: Sequence[Tensor], *, chunk_tokens: int
) -> tuple[Tensor, list[float]]:
    """Of every window [W, T]: the losses of its tokens but its first, float64 [W, T − 1], and the mean divergence over all rows.

    Both in nat; losses as `perplexity.token_losses` gives them.

    The divergence is Kullback and Leibler's Σ p·log(p / p′) of the dense distribution p, of logits `dense` [T, V] a window, from
    the model's as it is now, p′.
    """
    losses, divergences = [], []
    for window, reference in zip(windows, dense, strict=True):
        window = window.to(model.device)
        divergence, window_losses = torch.zeros((), dtype=torch.float64, device=model.device), []
        for rows, logits in prefill_chunks(model, window, chunk_tokens=chunk_tokens):
            window_losses.append(chunk_losses(window, rows, logits))
            log_method, log_dense = (torch.log_softmax(x.float(), -1) for x in (logits, reference[rows]))
            divergence = divergence + torch.nn.functional.kl_div(log_method, log_dense, reduction="sum", log_target=True)
        losses.append(torch.cat(window_losses).cpu())
        divergences.append(float(divergence / len(window)))
    return torch.stack(losses), divergences
