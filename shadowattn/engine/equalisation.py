"""SmoothQuant (arXiv 2211.10438, section 4): large channels of activations are made smaller, and their weights larger.

x · Wᵀ = (x / s) · (W · s)ᵀ. 1 / s is folded into what makes the channel: the norm before Q, K and V and before gate and up, the
rows of V before the output projection, the rows of up before the down projection. No product changes, but for rounding.
"""

from dataclasses import replace

import torch
from torch import Tensor

from shadowattn.models.decoder import LayerWeights
from shadowattn.models.shape import ModelShape

_LEAST = 1e-5


def equalised(
    layer: LayerWeights, ranges: dict[str, Tensor], shape: ModelShape, alpha: float
) -> tuple[LayerWeights, dict[str, Tensor]]:
    """The layer, and the ranges of its inputs, by s = max|x|^α / max|W|^(1 − α) of each channel.

    A channel of V serves all heads that read its key head, and has one s for all of them.
    """
    layer = replace(layer, **{name: getattr(layer, name).float() for name in ("qkv", "out", "gate", "up", "down")})
    by_qkv = _factors(ranges["qkv"], layer.qkv, alpha)
    by_mlp = _factors(ranges["mlp"], torch.cat([layer.gate, layer.up]), alpha)
    by_down = _factors(ranges["down"], layer.down, alpha)
    group = shape.heads // shape.kv_heads

    def of_values(x: Tensor) -> Tensor:
        """Of figures of the heads' channels [H·D] the largest of each channel of V, [G·D]."""
        return x.view(shape.kv_heads, group, shape.head_dim).amax(1).flatten()

    by_value = _powers(of_values(ranges["out"]), of_values(layer.out.abs().amax(0)), alpha)
    by_out = by_value.view(shape.kv_heads, 1, -1).expand(-1, group, -1).flatten()
    rows = torch.ones(len(layer.qkv))
    rows[-len(by_value) :] = 1 / by_value
    made = replace(
        layer,
        input_norm=layer.input_norm.float() / by_qkv,
        qkv=layer.qkv * by_qkv * rows[:, None],
        qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias.float() * rows,
        out=layer.out * by_out,
        mlp_norm=layer.mlp_norm.float() / by_mlp,
        gate=layer.gate * by_mlp,
        up=layer.up * by_mlp / by_down[:, None],
        down=layer.down * by_down,
    )
    factors = {"qkv": by_qkv, "out": by_out, "mlp": by_mlp, "down": by_down}
    return made, {point: ranges[point] / factor for point, factor in factors.items()}


def _factors(largest: Tensor, weight: Tensor, alpha: float) -> Tensor:
    return _powers(largest, weight.abs().amax(0), alpha)


def _powers(largest: Tensor, weight: Tensor, alpha: float) -> Tensor:
    return (largest.clamp(min=_LEAST) ** alpha / weight.clamp(min=_LEAST) ** (1 - alpha)).clamp(min=_LEAST)
