"""What was run: `python -m experiments.list`, each run with what it was asked for, its state and its age.

A run is `done`, `unfinished` (the same command goes on), or done by `other code` (the same command measures again). Its age is
the time since it finished, or since it began where it has not.
"""

import argparse
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.progress import show
from experiments.source import Code, current_code, part_hashes
from shadowattn.artifacts import read_json
from shadowattn.errors import InputError

_FINISHED = ("done", "other code")


@dataclass(frozen=True)
class Listed:
    """One run's folder. `settings`: what its command changed; `since`: when it finished, or began where it has not."""

    folder: Path
    state: str
    model: str
    settings: str
    since: datetime | None

    @property
    def experiment(self) -> str:
        return self.folder.parent.name


def runs(results: Path, experiment: str | None = None) -> list[Listed]:
    """All runs below a results folder, the latest first, unfinished ones at the end."""
    folders = [path for path in results.glob(f"runs/{experiment or '*'}/*") if path.is_dir()]
    code = current_code({})
    listed = [_listed(folder, code) for folder in sorted(folders)]
    never = datetime.min.replace(tzinfo=UTC)
    return sorted(listed, key=lambda run: (run.state in _FINISHED, run.since or never), reverse=True)


def table(listed: list[Listed], now: datetime) -> Table:
    """For a terminal."""
    listing = Table("run", "model", "settings", "state", "age")
    for run in listed:
        name = f"{run.experiment}/{run.folder.name}"
        listing.add_row(name, run.model, run.settings, run.state, "" if run.since is None else _age(now - run.since))
    return listing


def _listed(folder: Path, code: Code) -> Listed:
    """`code`: today's, but for the parts that the run names."""
    finished = (folder / "meta.json").is_file()
    record = folder / ("meta.json" if finished else "begun.json")
    if not record.is_file():
        return Listed(folder, "unfinished", "", "", None)
    try:
        meta = read_json(record, f"measure again with: rm -r {folder}, then the same command")
        state = "unfinished" if not finished else "other code" if _differs(code, meta) else "done"
        model = meta["model"]["name"] if "model" in meta else ""  # a study may need none
        since = datetime.fromisoformat(meta["finished" if finished else "started"])
        return Listed(folder, state, model, _settings(meta), since)
    except (InputError, KeyError, TypeError, ValueError):
        return Listed(folder, "damaged", "", "", None)


def _differs(code: Code, meta: dict[str, Any]) -> bool:
    try:
        parts = part_hashes(meta["config"])
    except (ImportError, SyntaxError):  # a part that can no longer be read
        return True
    return bool(replace(code, parts=parts).differences(meta["code"]))


def _settings(meta: dict[str, Any]) -> str:
    """What the command names but the experiment, which is its folder's name."""
    words = shlex.split(meta["command"])[3:]
    return " ".join(word for word in words if not word.startswith(("+exp=", "paths.", "threads=")))


def _age(age: timedelta) -> str:
    minutes = int(age.total_seconds() // 60)
    for unit, size in (("d", 24 * 60), ("h", 60)):
        if minutes >= size:
            return f"{minutes // size} {unit}"
    return f"{minutes} min"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", help="only runs of this experiment")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where results are (default: results)")
    options = parser.parse_args()
    if options.experiment and "=" in options.experiment:
        key, _, value = options.experiment.partition("=")
        use = f"--results {value}" if key == "paths.results" else "the name of an experiment"
        parser.exit(2, f"error: {options.experiment}: expected an experiment, got a setting; use {use}\n")
    listed = runs(options.results, options.experiment)
    if not listed:
        scope = f" of {options.experiment}" if options.experiment else ""
        parser.exit(2, f"error: {options.results}: found no runs{scope}; begin with: python -m experiments.run +exp=quickstart\n")
    show(table(listed, datetime.now(UTC)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
