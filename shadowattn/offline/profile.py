"""A profile on disk: JSON, read back only if it is whole."""

import json
from dataclasses import asdict
from pathlib import Path

from shadowattn.artifacts import write_json
from shadowattn.errors import InputError
from shadowattn.types import RetentionProfile, ScaleGrid

SCHEMA_VERSION = 1


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
        content["scales"] = ScaleGrid(
            **{name: value if isinstance(value, str) else tuple(value) for name, value in content["scales"].items()}
        )
        return RetentionProfile(**content)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"profile {path}: cannot be read ({error}); run the offline stage again") from error
