"""Which code a result was made by: results of other code are named as such, and are not taken for today's."""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.part_targets import PACKAGES, named_targets, source_files
from shadowattn import artifacts
from shadowattn.artifacts import content_hash, sha256, versions

# Of a checkout, or where a wheel puts all packages.
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Code:
    """All that is executed for a result. `source`: of this project; `parts`: of classes from elsewhere, by name.

    `kernels`: of the compiled library, which can be older than its source; None where there is none.
    """

    source: str
    parts: Mapping[str, str]
    kernels: str | None
    versions: Mapping[str, str]

    @property
    def hash(self) -> str:
        """12 hexadecimal digits for all of it."""
        return content_hash(asdict(self))

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """What is not as in `recorded`, the `asdict` of another code; names for a reader."""
        names = [] if recorded.get("source") == self.source else [f"source of {', '.join(PACKAGES)}"]
        parts, packages = recorded.get("parts", {}), recorded.get("versions", {})
        names += [name for name in sorted({*parts, *self.parts}) if parts.get(name) != self.parts.get(name)]
        names += [] if recorded.get("kernels") == self.kernels else ["compiled kernels"]
        return names + [f"version of {name}" for name in self.versions if packages.get(name) != self.versions[name]]


@cache
def source_hash() -> str:
    """12 hexadecimal digits for every source file of this project: Python, device descriptions, and C++ where it is here."""
    files = [path for package in PACKAGES for path in artifacts.source_files(_ROOT / package)]
    recipe = _ROOT / "CMakeLists.txt"
    return artifacts.files_hash([*files, *([recipe] if recipe.is_file() else [])], _ROOT)


def part_hashes(settings: Any) -> dict[str, str]:
    """For each part from outside of this project, a hash of the files that define it."""
    targets = {target for target in named_targets(settings).values() if target.split(".")[0] not in PACKAGES}
    return {target: content_hash([[path.name, sha256(path)] for path in source_files(target)]) for target in sorted(targets)}


def current_code(settings: Any) -> Code:
    """The code that a run with these settings executes. Imports no torch."""
    kernels = kernels_path()
    return Code(source_hash(), part_hashes(settings), sha256(kernels)[:12] if kernels else None, versions())


def kernels_path() -> Path | None:
    """`shadowattn.kernels.native.path()`, without an import of its package and with it torch."""
    name, folders = "shadowattn.kernels._native", [str(_ROOT / "shadowattn" / "kernels")]
    specs = filter(None, (finder.find_spec(name, folders) for finder in sys.meta_path))
    path = os.environ.get("SHADOWATTN_NATIVE") or next((spec.origin for spec in specs), None)
    return Path(path) if path else None


def stage_code(*settings: Any) -> str:
    """The code of a stage that these settings take part in; without the compiled kernels, so that machines can share stages."""
    return content_hash([source_hash(), part_hashes(list(settings))])
