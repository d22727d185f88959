"""How large each channel that enters a decoder's projections is: what static scales and SmoothQuant are made of."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shadowattn.engine.prefill import prefill_chunks
from shadowattn.models.decoder import check_family
from shadowattn.models.shape import fingerprint
from shadowattn.types import BlockRanges

# One projection of each input.
_PROJECTIONS = {"qkv": "self_attn.q_proj", "out": "self_attn.o_proj", "mlp": "mlp.gate_proj", "down": "mlp.down_proj"}


def observe_block_ranges(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    chunk_tokens: int,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> BlockRanges:
    """Runs the windows [W, T] through the model as it is and keeps the largest magnitude of every channel.

    Raises `InputError` on a model that the engine does not run.
    """
    check_family(model)
    layers = model.get_decoder().layers
    seen = {point: [torch.zeros(()) for _ in layers] for point in _PROJECTIONS}

    def watch(module: nn.Module, args: tuple[Tensor], *, point: str, layer: int) -> None:
        largest = args[0].detach().abs().flatten(0, -2).amax(0).float().cpu()
        seen[point][layer] = torch.maximum(seen[point][layer], largest)

    with ExitStack() as undo:
        for index, layer in enumerate(layers):
            for point, name in _PROJECTIONS.items():
                hook = partial(watch, point=point, layer=index)
                undo.callback(layer.get_submodule(name).register_forward_pre_hook(hook).remove)
        for window in progress(windows):
            for _ in prefill_chunks(model, window, chunk_tokens=chunk_tokens):
                pass
    return BlockRanges(**{point: [x.tolist() for x in tables] for point, tables in seen.items()}, fingerprint=fingerprint(model))
