"""Published questions, read from files on this machine or, where a path names one, from a data set of the model hub."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shadowattn import checks
from shadowattn.artifacts import sha256
from shadowattn.errors import InputError

# What an entry of a record has to be: a class; [x], a list of x; (x, y), a list of one x and one y; {"name": x}, an object with
# at least that entry; {str: x}, an object whose entries all are x.
Kind = Any
_NAMES = {str: "text", int: "a whole number", dict: "an object", object: "any value"}


def read_text(setting: str, path: str, remedy: str) -> str:
    """The text of the file that `task.SETTING` names, unpacked where its name ends in .gz. `InputError` where it is not there."""
    file = Path(path).expanduser()
    if not _is(Path.is_file, file):
        found = "which is a folder" if _is(Path.is_dir, file) else "where there is none"
        raise InputError(f"task.{setting}: expected a file, got {path!r:.200}, {found}; {remedy}")
    try:
        return gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text(encoding="utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"task.{setting}: expected UTF-8 text, got {path!r}, which is not ({error}); {remedy}") from error


def read_records(setting: str, path: str, entries: Mapping[str, Kind], remedy: str) -> list[dict[str, Any]]:
    """The JSON objects of the lines of a file, one or more, each with at least these `entries`, of these kinds."""
    lines = enumerate(read_text(setting, path, remedy).split("\n"), start=1)  # texts may hold what `splitlines` takes for an end
    records = [_record(f"task.{setting}, line {number}", line, entries, remedy) for number, line in lines if line.strip()]
    if not records:
        raise InputError(f"task.{setting}: expected a JSON object a line, got {path!r}, which is empty; {remedy}")
    return records


# How a data set of the hub is named: ORGANISATION/NAME. What is a file's name, is one.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@cache
def _commit(path: str, revision: str | None) -> str:
    """The commit of a data set of the hub that a revision, a branch or a tag, names now; None: the newest.

    Asked once a process, so that rows name what was read.
    """
    if revision and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    return HfApi().dataset_info(path, revision=revision).sha


@dataclass(frozen=True)
class Published:
    """Where published records are: a file of JSON lines, or a data set of the hub, its `split` at a `revision`.

    A revision that is no commit is resolved to one before anything is read.
    """

    path: str
    split: str = "test"
    revision: str | None = None

    @property
    def source(self) -> str:
        """Of what was read: a file by its name and the beginning of its SHA-256, a data set by its commit."""
        file = Path(self.path).expanduser()
        is_file = _is(Path.is_file, file)
        return f"{file.name} {sha256(file)[:12]}" if is_file else f"{self.path} {_commit(self.path, self.revision)}"

    def records(self, setting: str, entries: Mapping[str, Kind], remedy: str) -> list[dict[str, Any]]:
        """All of them, as `read_records` gives them. Raises `InputError` where they cannot be had."""
        file = Path(self.path).expanduser()
        if _is(Path.exists, file) or not _HUB_ID.fullmatch(self.path) or file.suffix in (".jsonl", ".gz", ".json"):
            return read_records(setting, self.path, entries, remedy)
        rows = self._downloaded(setting, remedy)
        if missing := sorted(set(entries) - set(rows.column_names)):
            raise InputError(
                f"task.{setting}: expected columns {', '.join(entries)} in {self.path}, got {', '.join(rows.column_names)}; "
                f"{', '.join(missing)} are missing; {remedy}"
            )
        records = list(rows)
        for number, record in enumerate(records):
            _check_kinds(f"task.{setting}, row {number}", record, entries, remedy)
        return records

    def _downloaded(self, setting: str, remedy: str) -> Iterable:
        import datasets  # two seconds to import, and only this needs it

        try:
            return datasets.load_dataset(self.path, split=self.split, revision=_commit(self.path, self.revision))
        except Exception as error:  # of the client, and of whatever it reaches the network by
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"task.{setting}: {self.path!r} is no file, and could not be had from the hub ({type(error).__name__}: "
                f"{reason}); {remedy}"
            ) from error


def _record(where: str, line: str, entries: Mapping[str, Kind], remedy: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        record = None
    if not isinstance(record, dict) or not set(entries) <= set(record):
        raise InputError(f"{where}: expected a JSON object with {', '.join(entries)}, got {checks.shown(line)}; {remedy}")
    _check_kinds(where, record, entries, remedy)
    return record


def _check_kinds(where: str, record: Mapping[str, Any], entries: Mapping[str, Kind], remedy: str) -> None:
    """Raises `InputError` on the first entry of another kind."""
    for name, kind in entries.items():
        if not _fits(record[name], kind):
            raise InputError(f"{where}: expected {name} to be {_named(kind)}, got {checks.shown(record[name])}; {remedy}")


def _fits(value: Any, kind: Kind) -> bool:
    if isinstance(kind, type):
        return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(one, kind[0]) for one in value)
    if isinstance(kind, tuple):
        return isinstance(value, list) and len(value) == len(kind) and all(map(_fits, value, kind))
    if not isinstance(value, dict):
        return False
    if str in kind:
        return all(_fits(one, kind[str]) for one in value.values())
    return all(name in value and _fits(value[name], one) for name, one in kind.items())


def _named(kind: Kind) -> str:
    if isinstance(kind, type):
        return _NAMES[kind]
    if isinstance(kind, list):
        return f"a list, each {_named(kind[0])}"
    if isinstance(kind, tuple):
        return f"a list of {' and '.join(map(_named, kind))}"
    if str in kind:
        return f"an object, each entry {_named(kind[str])}"
    return f"an object with {', '.join(f'{name} ({_named(one)})' for name, one in kind.items())}"


def _is(question: Callable[[Path], bool], file: Path) -> bool:
    """What the file system says; no file has a name that it cannot hold."""
    try:
        return question(file)
    except OSError:
        return False
