"""How large each channel of Q and K is, and along which axes the keys vary: what SparQ's offline relatives look at."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.observe import observe_prefill
from shadowattn.models.shape import fingerprint, model_shape
from shadowattn.online.chunk import Chunk
from shadowattn.types import ChannelStatistics


def observe_channels(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    chunk_tokens: int,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> ChannelStatistics:
    """Runs the windows [W, T] through the model, dense, in chunks, and sums up every head's Q and K after RoPE.

    Magnitudes are means over all tokens; axes are those of the covariance of a head's keys. Raises `InputError` on a model with
    sliding windows.
    """
    shape = model_shape(model)
    layers, heads, groups, dim = shape.layers, shape.heads, shape.kv_heads, shape.head_dim
    where = {"dtype": torch.float64, "device": model.device}
    q, k, total = (torch.zeros(layers, count, dim, **where) for count in (heads, groups, groups))
    products, tokens = torch.zeros(layers, groups, dim, dim, **where), torch.zeros(layers, **where)

    def observe(chunk: Chunk) -> None:
        layer, keys = chunk.layer, chunk.k[:, -chunk.q.shape[1] :].double()
        q[layer] += chunk.q.double().abs().sum(1)
        k[layer] += keys.abs().sum(1)
        total[layer] += keys.sum(1)
        products[layer] += keys.mT @ keys
        tokens[layer] += keys.shape[1]

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    count = tokens[:, None, None]
    mean = total / count
    covariance = products / count[..., None] - mean[..., :, None] * mean[..., None, :]
    axes = torch.linalg.eigh(covariance).eigenvectors.flip(-1).mT  # ascending: the largest variance is last
    return ChannelStatistics((q / count).tolist(), (k / count).tolist(), axes.tolist(), fingerprint(model))
