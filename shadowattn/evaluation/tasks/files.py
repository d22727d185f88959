"""Published questions, read from files on this machine or, where a path names one, from a data set of the model hub."""

import gzip
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowattn import checks
from shadowattn.artifacts import sha256
from shadowattn.errors import InputError


def read_text(setting: str, path: str, remedy: str) -> str:
    """The text of the file that `task.SETTING` names, unpacked where its name ends in .gz. `InputError` where it is not there."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"task.{setting}: expected a file, got {path!r}, where there is none; {remedy}")
    try:
        return gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text(encoding="utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"task.{setting}: expected UTF-8 text, got {path!r}, which is not ({error}); {remedy}") from error


def read_records(setting: str, path: str, names: tuple[str, ...], remedy: str) -> list[dict[str, Any]]:
    """The JSON objects of the lines of a file, each with at least the entries `names`."""
    lines = enumerate(read_text(setting, path, remedy).split("\n"), start=1)  # texts may hold what `splitlines` takes for an end
    return [_record(f"task.{setting}, line {number}", line, names, remedy) for number, line in lines if line.strip()]


# How a data set of the hub is named: ORGANISATION/NAME. What is a file's name, is one.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Published:
    """Where published records are: a file of JSON lines, or a data set of the hub, its `split` at a `revision`."""

    path: str
    split: str = "test"
    revision: str | None = None

    @property
    def source(self) -> str:
        """A file by its name and the beginning of its SHA-256, a data set by its revision."""
        file = Path(self.path).expanduser()
        return f"{file.name} {sha256(file)[:12]}" if file.is_file() else f"{self.path} {self.revision or 'newest revision'}"

    def records(self, setting: str, names: tuple[str, ...], remedy: str) -> list[dict[str, Any]]:
        """All of them, each with at least the entries `names`. Raises `InputError` where they cannot be had."""
        file = Path(self.path).expanduser()
        if file.exists() or not _HUB_ID.fullmatch(self.path) or file.suffix in (".jsonl", ".gz", ".json"):
            return read_records(setting, self.path, names, remedy)
        rows = self._downloaded(setting, remedy)
        if missing := sorted(set(names) - set(rows.column_names)):
            raise InputError(
                f"task.{setting}: expected columns {', '.join(names)} in {self.path}, got {', '.join(rows.column_names)}; "
                f"{', '.join(missing)} are missing; {remedy}"
            )
        return list(rows)

    def _downloaded(self, setting: str, remedy: str) -> Iterable:
        import datasets  # two seconds to import, and only this needs it

        try:
            return datasets.load_dataset(self.path, split=self.split, revision=self.revision)
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"task.{setting}: {self.path!r} is no file, and could not be had from the hub ({type(error).__name__}: "
                f"{reason}); {remedy}"
            ) from error


def _record(where: str, line: str, names: tuple[str, ...], remedy: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict) or not set(names) <= set(record):
        raise InputError(f"{where}: expected a JSON object with {', '.join(names)}, got {checks.shown(line)}; {remedy}")
    return record
