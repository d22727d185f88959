"""Published questions, read from files on this machine: nothing is downloaded."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from shadowattn import checks
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
    lines = read_text(setting, path, remedy).splitlines()
    return [_record(f"task.{setting}, line {number}", line, names, remedy) for number, line in enumerate(lines, start=1) if line]


def _record(where: str, line: str, names: tuple[str, ...], remedy: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict) or not set(names) <= set(record):
        raise InputError(f"{where}: expected a JSON object with {', '.join(names)}, got {checks.shown(line)}; {remedy}")
    return record
