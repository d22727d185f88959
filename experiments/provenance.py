"""Where committed rows come from: beside every `NAME.csv` a `NAME.json` with command, code, machine, versions and time."""

import hashlib
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.environment import machine
from experiments.source import source_hash
from shadowattn.artifacts import read_json, sha256, versions, write_json, write_text
from shadowattn.errors import InputError

_PATH = re.compile(r"^(?P<key>[^=/~]*=)?(?P<path>[/~].*)$")


def origin(command: str, config_hash: str, started: datetime) -> dict[str, Any]:
    """What rows that were measured just now come from; a JSON object. `started` in UTC."""
    on = machine()
    return {
        "command": portable(command),
        "config_hash": config_hash,
        "code": source_hash(),
        "commit": on.pop("git_commit"),
        "dirty": on.pop("git_dirty"),
        "machine": on,
        "versions": versions(),
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def origin_of_run(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The same from a finished run's `meta.json`. Raises `InputError` where that is too old to say."""
    if not {"command", "code", "machine", "started", "finished"} <= meta.keys():
        raise InputError("expected a run whose meta.json names its command and code, got an older one; measure again")
    on = dict(meta["machine"])
    return {
        "command": portable(meta["command"]),
        "config_hash": meta["config_hash"],
        "code": meta["code"]["source"],
        "commit": on.pop("git_commit"),
        "dirty": on.pop("git_dirty"),
        "machine": on,
        **{name: meta[name] for name in ("versions", "started", "finished")},
        **({"study": meta["config"]["study"]} if "study" in meta.get("config", {}) else {}),
    }


def called(module: str) -> str:
    """The command that started this process, as `python -m module …`."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def portable(command: str) -> str:
    """A command without what is local to a machine: where results go, and the folders of files that it names."""
    words = [word for word in shlex.split(command) if not word.startswith("paths.")]
    found = [(word, _PATH.match(word)) for word in words]
    return shlex.join([f"{match['key'] or ''}{Path(match['path']).name}" if match else word for word, match in found])


def write_csv(rows: pd.DataFrame, path: Path, source: Mapping[str, Any]) -> None:
    """Writes rows as CSV and what they come from beside it; each file whole or not at all."""
    text = rows.to_csv(index=False)
    write_json(sidecar(path), {**source, "rows": len(rows), "sha256": hashlib.sha256(text.encode()).hexdigest()})
    write_text(path, text)


def joined(path: Path, source: Mapping[str, Any]) -> dict[str, Any]:
    """What rows of `path` and new ones together come from. Raises `InputError` where they would be of two codes or machines."""
    if not path.is_file():
        return dict(source)
    earlier = read_json(sidecar(path), f"start anew with another --out, or: rm {path}")
    for name in ("code", "commit", "dirty", "machine", "versions"):
        if earlier[name] != source[name]:
            raise InputError(f"{path}: holds rows of another {name} than today's; start anew with another --out, or: rm {path}")
    commands = dict.fromkeys([*earlier["command"].split(" && "), source["command"]])
    return {**source, "command": " && ".join(commands), "started": earlier["started"]}


def objections(source: Mapping[str, Any]) -> list[str]:
    """Why rows should not be published as those of what is checked out."""
    reasons = []
    if source["commit"] is None:
        reasons.append("measured outside a checkout, so that no commit names the code")
    elif source["dirty"]:
        reasons.append(f"measured with changes that are not in commit {source['commit'][:10]}")
    if source["code"] != source_hash():
        reasons.append(f"measured with other code ({source['code']}) than is checked out ({source_hash()})")
    return reasons


def mark_unrecorded(path: Path, commit: str, rows: int) -> None:
    """Writes beside a CSV that nobody recorded where its rows come from; `commit` is the one that put them there."""
    write_json(sidecar(path), {"recorded": False, "published_in": commit, "rows": rows, "sha256": sha256(path)})


def state(path: Path) -> str:
    """`ok`, or what is wrong with a committed CSV: no sidecar, altered, not recorded (from before there were sidecars), or stale,
    which is made by other code than is here.
    """
    if not sidecar(path).is_file():
        return "no sidecar"
    source = read_json(sidecar(path), "publish the run again")
    if source["sha256"] != sha256(path):
        return "altered"
    if not source.get("recorded", True):
        return "not recorded"
    return "ok" if source["code"] == source_hash() else "stale"


def sidecar(path: Path) -> Path:
    """The JSON beside a CSV."""
    return path.with_suffix(".json")
