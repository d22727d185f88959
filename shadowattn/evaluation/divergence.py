"""How far a method moves what the model says next: the divergence of its next-token distribution from dense attention's."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.prefill import prefill_chunks
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import chunk_losses


class DenseLogits:
    """The logits of the model as it is on some windows [W, T], each computed when it is first asked for.

    A GPU's stay on it. The CPU's are kept in files without names in `folder`, which go when this goes: those of 32 windows of
    2048 tokens and 49,152 words are 6 GB in bfloat16, and the system holds as much of them in memory as it has room for.
    `folder` None: the system's for temporary files.
    """

    def __init__(self, model: PreTrainedModel, windows: Tensor, *, chunk_tokens: int, folder: Path | None = None):
        self._model, self._windows, self._chunk_tokens, self._folder = model, windows, chunk_tokens, folder
        self._kept: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the logits of all windows."""
        return self._windows.numel() * self._model.config.get_text_config().vocab_size * self._model.dtype.itemsize

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        """Logits [T, V] of one window, in the model's dtype. Not inside a context that replaces the model's attention."""
        if index not in self._kept:
            chunks = [logits for _, logits in prefill_chunks(self._model, self._windows[index], chunk_tokens=self._chunk_tokens)]
            self._kept[index] = _in_file(chunks, self._folder) if self._model.device.type == "cpu" else torch.cat(chunks)
        return self._kept[index]


def _in_file(parts: Sequence[Tensor], folder: Path | None) -> Tensor:
    """The parts one after another, in a file without a name. Raises `InputError` where the disk takes no more."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for part in parts:
                file.write(part.contiguous().view(torch.uint8).numpy())
            file.flush()
            mapped = np.memmap(file, np.uint8, mode="c")
    except OSError as error:
        raise InputError(
            f"the logits of dense attention: {error}; make room on the disk of {folder or tempfile.gettempdir()}"
        ) from error
    return torch.from_numpy(mapped).view(parts[0].dtype).view(-1, *parts[0].shape[1:])


def window_divergences(
    model: PreTrainedModel, windows: Tensor, dense: Iterable[Tensor], *, chunk_tokens: int
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
