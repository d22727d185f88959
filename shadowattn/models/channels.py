"""Factors on the channels of Q and K, folded into a model's projections: Q·K is unchanged, and Q and K have other ranges."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shadowattn.errors import InputError
from shadowattn.models.shape import model_shape

FOLDED_FAMILIES = ("llama", "qwen2")


@contextmanager
def channel_factors(model: PreTrainedModel, factors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, every layer projects Q times `factors[layer]` [G, D] and K divided by it; on leaving the weights are as before.

    The two channels that RoPE rotates into one another, d and d + D / 2, have to share a factor, and the query heads of a key
    head share theirs. Raises `InputError` where they do not, and on a model of another family than `FOLDED_FAMILIES`: a norm or
    another rotary embedding behind the projections would undo a factor.
    """
    kind = model.config.get_text_config().model_type
    if kind not in FOLDED_FAMILIES:
        raise InputError(f"channel factors: expected a model of {', '.join(FOLDED_FAMILIES)}, got {kind}; use one of these")
    shape = model_shape(model)
    size = (shape.kv_heads, shape.head_dim)
    for factor in factors:
        if factor.shape != size or not torch.equal(*factor.chunk(2, -1)) or not bool((factor > 0).all()):
            raise InputError(
                f"channel factors: expected [G, D] = {list(size)}, positive, one for each pair of channels d and d + D / 2, got "
                f"{list(factor.shape)}; take them of evaluation.outliers.rescalings"
            )
    layers = model.get_decoder().layers
    if len(factors) != len(layers):
        raise InputError(f"channel factors: expected one [G, D] for each of {len(layers)} layers, got {len(factors)}")
    kept = []
    try:
        with torch.no_grad():
            for layer, factor in zip(layers, factors, strict=True):
                of_queries = factor.repeat_interleave(shape.heads // shape.kv_heads, 0).flatten()
                for projection, by in ((layer.self_attn.q_proj, of_queries), (layer.self_attn.k_proj, 1 / factor.flatten())):
                    for name, tensor in projection.named_parameters():
                        kept.append((projection, name, tensor))
                        rows = by.to(tensor).view(-1, *(1,) * (tensor.dim() - 1))
                        projection.register_parameter(name, nn.Parameter(tensor * rows, requires_grad=tensor.requires_grad))
        yield
    finally:
        for projection, name, tensor in kept:
            projection.register_parameter(name, tensor)
