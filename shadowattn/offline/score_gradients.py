"""Gradients of a model's own log-likelihood at the output of every layer: what a small change there does to what it says next.

For a change Δ of a layer's output the KL divergence of the next-token distributions is ½ Δᵀ F Δ to second order, with the Fisher
information F = E[g gᵀ] and g the gradient of the log-likelihood of tokens drawn from the model itself (Amari, 1998).
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shadowattn.errors import InputError
from shadowattn.models.layerwise import decoder_layers, hidden_states

# Rows whose probabilities exist at a time, in float64: 1 GB would be those of 1024 rows and 128,000 tokens.
_ROWS = 64


def score_gradients(model: PreTrainedModel, windows: Tensor, *, seed: int) -> list[Tensor]:
    """For each decoder layer g [W, T, C] in the model's dtype, for windows int64 [W, T].

    Of the sum over all T rows of log p(token), one token drawn a row, with attention as the model has it. Raises `InputError` on
    a model whose layers are not called once each.
    """
    layers = decoder_layers(model)
    # Drawn on the CPU, so that a model elsewhere says the same tokens.
    draws = torch.rand(windows.shape, generator=torch.Generator().manual_seed(seed)).to(model.device)
    gradients = [_of_window(model, layers, *pair) for pair in zip(windows.to(model.device), draws, strict=True)]
    return [torch.stack([window[layer] for window in gradients]) for layer in range(len(layers))]


@torch.inference_mode(False)
@torch.enable_grad()
def _of_window(model: PreTrainedModel, layers: list[nn.Module], window: Tensor, draws: Tensor) -> list[Tensor]:
    """[L] of [T, C]; `draws` [T] in [0, 1) decide which tokens are drawn."""
    outputs: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda _, __, out: outputs.append(hidden_states(out))) for layer in layers]
    # Where no weight asks for a gradient, none would be recorded.
    handles.append(model.get_input_embeddings().register_forward_hook(lambda _, __, out: out.requires_grad_()))
    try:
        logits = model(input_ids=window[None].clone(), use_cache=False).logits[0]  # not a tensor of an inference mode outside
    finally:
        for handle in handles:
            handle.remove()
    if len(outputs) != len(layers):
        raise InputError(
            f"{type(model).__name__}: expected each of its {len(layers)} layers to be called once, counted {len(outputs)} calls; "
            "use allocator.measure=error"
        )
    parts = [_of_logits(*some) for some in zip(logits.detach().split(_ROWS), draws.split(_ROWS), strict=True)]
    gradients = torch.autograd.grad(logits, outputs, grad_outputs=torch.cat(parts))
    return [gradient[0] for gradient in gradients]


def _of_logits(logits: Tensor, draws: Tensor) -> Tensor:
    """∂ log p(drawn) / ∂ logits [R, V], in their dtype: one at the token that is drawn, less the probabilities."""
    probabilities = torch.softmax(logits.double(), -1)
    below = probabilities.cumsum(-1) < draws[:, None]
    drawn = below.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return torch.zeros_like(probabilities).scatter_(-1, drawn, 1.0).sub_(probabilities).to(logits.dtype)
