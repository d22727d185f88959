"""Stage outputs on disk: found by the hash of what made them, written whole or not at all, checked when read.

A stage's folder holds `result.json`, `manifest.json`, and from when it is made `units-CODE/`, one small file per finished unit
of work, so that an interrupted stage goes on where it stopped.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from shadowattn.errors import InputError

SCHEMA_VERSION = 1
T = TypeVar("T")
_PACKAGES = ("shadowattn", "torch", "openvino", "nncf", "transformers", "tokenizers", "numpy", "scipy", "ortools")


def cache_folder() -> Path:
    """Where fetched models and what was measured of this machine are kept: $SHADOWATTN_CACHE, else `shadowattn` in the user's
    cache directory.
    """
    if folder := os.environ.get("SHADOWATTN_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shadowattn"


def content_hash(value: Any) -> str:
    """12 hexadecimal digits of the SHA-256 of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file so that a reader sees the old content or the new, never a part."""
    write_text(path, json.dumps(value, indent=1))


def write_text(path: Path, text: str) -> None:
    """The same for text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)


def read_json(path: Path, remedy: str) -> Any:
    """The content of a JSON file. Raises `InputError` with `remedy` where it is missing or cut short."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); {remedy}") from error


def tuples(content: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with tuples for lists, however deep: what frozen dataclasses were written from."""

    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    return {name: frozen(value) for name, value in content.items()}


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def library_code() -> str:
    """12 hexadecimal digits for every source file of this package."""
    package = Path(__file__).parent
    return files_hash(source_files(package), package)


def source_files(folder: Path) -> list[Path]:
    """What of a folder is executed, or decides a number: Python, device descriptions, C and C++; in order."""
    return sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".h", ".c", ".cpp", ".yaml"))


def files_hash(files: Sequence[Path], root: Path) -> str:
    """12 hexadecimal digits for files' contents and where they are below `root`."""
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a number; `none` for one that is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


class Units:
    """A folder of finished units of work, one JSON file each."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def has(self, key: str) -> bool:
        return self._path(key).exists()

    def put(self, key: str, value: Any) -> None:
        """Stores one unit, whole or not at all."""
        write_json(self._path(key), value)

    def get(self, key: str, compute: Callable[[], Any]) -> Any:
        """The stored value of one unit, computed and stored if it is not there yet."""
        path = self._path(key)
        if not path.exists():
            self.put(key, compute())
        return self.read(key)

    def read(self, key: str) -> Any:
        """The stored value of one unit. Raises `InputError` where it is missing or damaged."""
        path = self._path(key)
        return read_json(path, f"rebuild with: rm {path}, then the same command")

    def _path(self, key: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9_.@-]", "_", key)
        if name != key:  # names that look alike now stay apart
            name += f"-{content_hash(key)}"
        return self.folder / f"{name}.json"


class Stage:
    """One stage's output for one set of inputs: `inputs` is everything that its result depends on, as JSON values.

    `code` names the code that makes it: a result and units of other code count for nothing, and are replaced.
    """

    def __init__(self, root: Path, name: str, inputs: dict, *, code: str = ""):
        self.name, self.inputs, self.code = name, inputs, code
        self.folder = Path(root) / f"{name}-{content_hash(inputs)}"
        self.units = Units(self.folder / f"units-{code}" if code else self.folder / "units")

    @property
    def done(self) -> bool:
        """Whether there is a result of this code; a manifest that cannot be read is for `read` to refuse."""
        return (self.folder / "manifest.json").exists() and not self.outdated

    @property
    def outdated(self) -> bool:
        """Whether there is a result, and other code made it."""
        try:
            manifest = json.loads((self.folder / "manifest.json").read_text())
        except (OSError, ValueError):
            return False
        return isinstance(manifest, dict) and manifest.get("code", "") != self.code

    def finish(self, result: Any) -> None:
        """Stores the result; the manifest comes last and makes it count. Units of other code go."""
        for units in self.folder.glob("units*"):
            if units != self.units.folder:
                shutil.rmtree(units)
        write_json(self.folder / "result.json", result)
        manifest = {"schema_version": SCHEMA_VERSION, "stage": self.name, "inputs": self.inputs, "code": self.code}
        manifest |= {"versions": versions(), "files": {"result.json": sha256(self.folder / "result.json")}}
        write_json(self.folder / "manifest.json", manifest)

    def result(self, kind: type[T], measure: Callable[[], T]) -> T:
        """The dataclass that is stored here; what `measure` returns is stored first where there is none of this code."""
        if not self.done:
            self.finish(asdict(measure()))
        return kind(**tuples(self.read()))

    def read(self) -> Any:
        """The stored result. A truncated, altered or foreign one is refused with the reason and what rebuilds it."""
        remedy = f"rebuild with: rm -r {self.folder}, then the same command"
        manifest = read_json(self.folder / "manifest.json", remedy)
        result = self.folder / "result.json"
        reason = None
        if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
            reason = f"expected schema version {SCHEMA_VERSION} in manifest.json"
        elif manifest.get("inputs") != json.loads(json.dumps(self.inputs)):
            reason = "its manifest names other inputs"
        elif not result.is_file() or manifest.get("files", {}).get("result.json") != sha256(result):
            reason = "result.json is missing, altered or cut short"
        if reason:
            raise InputError(f"{self.name} in {self.folder}: {reason}; {remedy}")
        return read_json(result, remedy)
