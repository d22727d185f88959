"""Where committed rows come from: beside every `NAME.csv` a `NAME.json` with command, code, machine, versions and time."""

import hashlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.source import source_hash
from shadowattn.artifacts import read_json, sha256, write_json, write_text
from shadowattn.errors import InputError

_PATH = re.compile(r"^(?P<key>[^=/~]*=)?(?P<path>[/~].*)$")


def origin_of_run(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a finished run's rows come from, by its `meta.json`; a JSON object. Raises `InputError` where it is too old."""
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
        **({"int8": meta["int8"]} if "int8" in meta else {}),
        **({"study": portable_settings(meta["config"]["study"])} if "study" in meta.get("config", {}) else {}),
    }


def measured_on(machine: Mapping[str, Any], commit: str | None, dirty: bool | None) -> str:
    """Machine and commit in one line, for tables and figures, and whether the code had changes that are not in it."""
    gpu = f", model on {machine['gpu']}" if "gpu" in machine else ""
    return f"{machine['processor']}, {machine['cores']} cores{gpu}{_commit(commit, dirty)}"


def _commit(commit: str | None, dirty: bool | None) -> str:
    return f", commit {commit[:7]}{', changed' if dirty else ''}" if commit else ""


def origin_line(rows: pd.DataFrame, machine: Mapping[str, Any], commit: str | None, dirty: bool | None) -> str:
    """Where rows come from in one line: machine and commit; the device of simulated rows, the compiler of compiled ones."""
    if set(rows.get("measured", ())) == {"compiled"}:
        compilers = ", ".join(sorted(set(rows.compiler)))
        return f"compiled, not run: Intel's NPU compiler {compilers}{_commit(commit, dirty)}"
    if set(rows.get("measured", ())) != {"simulated"}:
        return measured_on(machine, commit, dirty)
    devices = sorted(set(rows.device) - {""}) if "device" in rows else []
    return " ".join(["simulated:" if devices else "simulated", ", ".join(devices)]).strip() + _commit(commit, dirty)


def portable(command: str) -> str:
    """A command without what is local to a machine: where results go, and the folders of files that it names."""
    words = [word for word in shlex.split(command) if not word.startswith("paths.")]
    matches = [(word, _PATH.match(word)) for word in words]
    return shlex.join([f"{match['key'] or ''}{Path(match['path']).name}" if match else word for word, match in matches])


def portable_settings(settings: Any) -> Any:
    """Settings without the folders of files that they name."""
    if isinstance(settings, Mapping):
        return {key: portable_settings(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [portable_settings(value) for value in settings]
    return Path(settings).name if isinstance(settings, str) and settings.startswith(("/", "~")) else settings


def write_csv(rows: pd.DataFrame, path: Path, source: Mapping[str, Any]) -> None:
    """Writes rows as CSV and what they come from beside it; each file whole or not at all."""
    text = rows.to_csv(index=False)
    write_json(sidecar(path), {**source, "rows": len(rows), "sha256": hashlib.sha256(text.encode()).hexdigest()})
    write_text(path, text)


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
