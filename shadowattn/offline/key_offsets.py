"""The key offset: a vector for each layer and key/value head, calibrated on text, which the estimate subtracts from K.

Keys often share a large component, most of all where the projections have biases. It changes no ranking of a row's keys, and yet
it sets the INT8 scale. `offline.scales` measures the scales of what is left. The mean key as an online quantity is the smoothing
of SageAttention (arXiv 2410.02367); here it is fixed beforehand, as a static graph's scales are.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn import checks
from shadowattn.engine.observe import observe_prefill
from shadowattn.models.shape import model_shape
from shadowattn.online.chunk import Chunk
from shadowattn.types import KEY_OFFSETS, KeyOffset


def observe_key_offset(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    chunk_tokens: int,
    how: str,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> KeyOffset | None:
    """Runs the windows [W, T] through the model, dense, in chunks, and takes one vector for each layer and key head.

    `how`: `mean`, over all keys of the windows after RoPE, channel by channel; `midrange`, (largest + least) / 2 of each channel,
    which makes the largest magnitude of what is left as small as it can be; `none`: None, and no forward pass. Raises
    `InputError` on any other name, and on a model with sliding windows.
    """
    if checks.one_of("key_offset", how, KEY_OFFSETS) == "none":
        return None
    shape = model_shape(model)
    size = shape.layers, shape.kv_heads, shape.head_dim
    where = {"device": model.device}
    total, count = torch.zeros(size, dtype=torch.float64, **where), torch.zeros(shape.layers, dtype=torch.int64, **where)
    least, largest = torch.full(size, torch.inf, **where), torch.full(size, -torch.inf, **where)

    def observe(chunk: Chunk) -> None:
        layer, new = chunk.layer, chunk.k[:, -chunk.q.shape[1] :].float()
        total[layer] += new.double().sum(1)
        count[layer] += new.shape[1]
        least[layer] = torch.minimum(least[layer], new.amin(1))
        largest[layer] = torch.maximum(largest[layer], new.amax(1))

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    offset = total / count[:, None, None] if how == "mean" else (least.double() + largest) / 2
    return KeyOffset(offset.float().tolist(), how)
