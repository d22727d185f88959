"""Profiles, key offsets and banks for tiny models."""

import torch

from shadowattn.graphs import GraphBank
from shadowattn.graphs.planner import ShapePlan, plan_shapes
from shadowattn.models import fingerprint, model_shape
from shadowattn.types import KeyOffset, RetentionProfile, ScaleGrid

GRID = ScaleGrid((0.01, 0.02, 0.04), (0.01, 0.02, 0.04))


def key_offset(layers: int, groups: int, dim: int, *, seed: int = 0, size: float = 1.0) -> KeyOffset:
    """Normally distributed vectors."""
    values = size * torch.randn(layers, groups, dim, generator=torch.Generator().manual_seed(seed))
    return KeyOffset(values.tolist())


def profile_for(model, retention: float, *, grid: ScaleGrid = GRID) -> RetentionProfile:
    """The same retention for every head."""
    shape = model_shape(model)
    return RetentionProfile(
        retention=((retention,) * shape.heads,) * shape.layers,
        scales=grid,
        head_dim=shape.head_dim,
        fingerprint=fingerprint(model),
        model="tiny",
        allocator="uniform",
    )


def bank_for(
    model, *, grid: ScaleGrid = GRID, chunk_tokens: int = 32, context_tokens: int = 128, fold: bool = True, **options
) -> GraphBank:
    """Key capacities double from a chunk to the context; one or two heads a launch."""
    shape = model_shape(model)
    keys = tuple(chunk_tokens << i for i in range(8) if chunk_tokens << i <= context_tokens)
    shapes = plan_shapes(
        ShapePlan((chunk_tokens,), keys, 0.0, "powers"),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        launch_heads=(1, 2),
        fold=fold,
    )
    return GraphBank.build(profile_for(model, 1.0, grid=grid), shapes, **options)
