"""Symmetric INT8: scales from a tensor, integers from a scale. What the graphs do inside, for those that take integers."""

import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.estimation import INT8_MAX


def absmax_scales(x: Tensor) -> Tensor:
    """The real value of one integer step, absmax / 127 over each head's rows; float32 [heads] for x [heads, rows, D].

    Raises `InputError` on NaN or infinity, whose ranking would mean nothing, and where there are no values at all.
    """
    if 0 in x.shape[1:]:
        raise InputError(f"expected at least one row and one dimension, got q or k of shape {list(x.shape)}")
    largest = torch.maximum(-x.amin((1, 2)), x.amax((1, 2))).float()
    if not torch.isfinite(largest).all():
        raise InputError("expected finite q and k, got NaN or infinity; a ranking of keys would mean nothing")
    return largest.clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX


def quantise(x: Tensor, scales: Tensor) -> Tensor:
    """int8 of x [heads, rows, D]: round half to even of x / scale, clipped to ±127."""
    return torch.round(x.float() / scales[:, None, None]).clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
