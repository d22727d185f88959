"""A profile, made from what an allocator needs; and on disk: JSON, read back only if it is whole."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from shadowattn.artifacts import write_json
from shadowattn.errors import InputError
from shadowattn.models.shape import ModelShape
from shadowattn.offline.allocators import Allocator, allot
from shadowattn.types import Importance, RetentionProfile, ScaleGrid, Sensitivity

SCHEMA_VERSION = 1


def allocated_profile(
    allocator: Allocator,
    shape: ModelShape,
    retention: float,
    *,
    importance: Callable[[], Importance],
    sensitivity: Callable[[str], Sensitivity],
    scales: ScaleGrid,
    fingerprint: str,
    model: str,
    name: str,
) -> RetentionProfile:
    """The retention of every head by `allocator`, a mean of `retention` (section 3.2), with the scales of graphs (section 3.3).

    `importance` and `sensitivity` (given one of `types.MEASURES`) are called only where the allocator needs them.
    `name` is what the profile calls its allocator, `model` and `fingerprint` say whose heads these are.
    """
    if "sensitivity" in allocator.needs:
        allocator = replace(allocator, sensitivity=sensitivity(allocator.measure))
    table = allot(allocator, shape, retention, importance() if "importance" in allocator.needs else None)
    return RetentionProfile(
        retention=tuple(map(tuple, table)),
        scales=scales,
        head_dim=shape.head_dim,
        fingerprint=fingerprint,
        model=model,
        allocator=name,
    )


def save_profile(profile: RetentionProfile, path: Path) -> None:
    """Writes a profile as JSON, atomically."""
    write_json(Path(path), {"schema_version": SCHEMA_VERSION} | asdict(profile))


def load_profile(path: Path) -> RetentionProfile:
    """Reads a profile. Raises `InputError` on a file that is missing, cut short, of another version or out of range."""
    try:
        content = json.loads(Path(path).read_text())
        if content.pop("schema_version") != SCHEMA_VERSION:
            raise InputError(f"profile {path}: expected schema version {SCHEMA_VERSION}; run the offline stage again")
        content["retention"] = tuple(tuple(layer) for layer in content["retention"])
        content["scales"] = ScaleGrid(**content["scales"])
        return RetentionProfile(**content)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"profile {path}: cannot be read ({error}); run the offline stage again") from error
