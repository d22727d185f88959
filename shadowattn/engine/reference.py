"""A decoder layer in plain torch, float32: what the engine's static blocks have to compute."""

import torch
from torch import Tensor

from shadowattn.models.decoder import Decoder, LayerWeights


def projected(decoder: Decoder, layer: LayerWeights, hidden: Tensor, first_position: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q [H, n, D], k and v [G, n, D] of hidden states [n, E], rotated for the positions from `first_position` on."""
    shape, rows = decoder.shape, len(hidden)
    qkv = normed(decoder, hidden, layer.input_norm) @ layer.qkv.float().T
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias.float()
    q, k, v = qkv.view(rows, -1, shape.head_dim).transpose(0, 1).split([shape.heads, shape.kv_heads, shape.kv_heads])
    if layer.q_norm is not None:
        q, k = normed(decoder, q, layer.q_norm), normed(decoder, k, layer.k_norm)
    cos, sin = (table[first_position : first_position + rows] for table in (decoder.cos, decoder.sin))
    return *(x * cos + torch.cat([-x[..., shape.head_dim // 2 :], x[..., : shape.head_dim // 2]], -1) * sin for x in (q, k)), v


def finished(decoder: Decoder, layer: LayerWeights, attended: Tensor, residual: Tensor) -> Tensor:
    """What leaves the layer [n, E], for what its heads computed [H, n, D] and what entered it [n, E]."""
    x = residual + attended.transpose(0, 1).flatten(1) @ layer.out.float().T
    between = normed(decoder, x, layer.mlp_norm)
    gate, up = between @ layer.gate.float().T, between @ layer.up.float().T
    active = torch.relu(gate) if decoder.activation == "relu" else torch.nn.functional.silu(gate)
    return x + (active * up) @ layer.down.float().T


def normed(decoder: Decoder, x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + decoder.norm_eps) * weight.float()
