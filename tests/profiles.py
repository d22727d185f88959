"""Profiles and banks for tiny models."""

from shadowattn.graphs import GraphBank
from shadowattn.graphs.buckets import plan_shapes
from shadowattn.models import fingerprint, model_shape
from shadowattn.types import RetentionProfile, ScaleGrid

GRID = ScaleGrid((0.01, 0.02, 0.04), (0.01, 0.02, 0.04))


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


def bank_for(model, *, grid: ScaleGrid = GRID, chunk_tokens: int = 32, context_tokens: int = 128) -> GraphBank:
    shape = model_shape(model)
    shapes = plan_shapes(
        heads=shape.heads,
        head_dim=shape.head_dim,
        chunk_tokens=chunk_tokens,
        context_tokens=context_tokens,
        launch_heads=(1, 2),
    )
    return GraphBank.build(profile_for(model, 1.0, grid=grid), shapes)
