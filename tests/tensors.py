"""Random q, k and v, and the shapes that matter."""

import torch
from torch import Tensor

# MHA, GQA, MQA
HEADS = [(4, 4), (4, 2), (4, 1)]
HEAD_DIMS = [64, 80, 96, 128]


def qkv(heads: int, kv_heads: int, rows: int, keys: int, dim: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q [H, Q, D], k and v [G, K, D]; keys vary in length, so that attention is not uniform."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, rows, dim, generator=generator)
    k = torch.randn(kv_heads, keys, dim, generator=generator) * (0.5 + torch.rand(keys, 1, generator=generator))
    return q, k, torch.randn(kv_heads, keys, dim, generator=generator)


def integer_qkv(heads: int, kv_heads: int, rows: int, keys: int, dim: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The same with small integers in q and k: many exact ties, and products that every order of summation agrees on."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-2, 3, (heads, rows, dim), generator=generator).float()
    k = torch.randint(-2, 3, (kv_heads, keys, dim), generator=generator).float()
    return q, k, torch.randn(kv_heads, keys, dim, generator=generator)
