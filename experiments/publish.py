"""Puts a finished run where the repository keeps it: `python -m experiments.publish results/runs/EXPERIMENT/HASH`.

Its rows become `results/reference/EXPERIMENT.csv`, with what they come from in `EXPERIMENT.json` beside it; the first figure that
its study draws of that file becomes `docs/EXPERIMENT.png`, and any other that a page shows `docs/EXPERIMENT_FIGURE.png`.

    python -m experiments.publish --redraw         every published figure once more, of the committed rows
    python -m experiments.publish --reflag         sets the flags of published losses and scores by today's rules
    python -m experiments.publish --check          what is published, how old it is, and whether today's code made it
"""

import argparse
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from experiments.compose import composed
from experiments.part_building import build
from experiments.part_settings import complete
from experiments.progress import bar, show
from experiments.provenance import objections, origin_line, origin_of_run, sidecar, state, write_csv
from experiments.source import source_hash
from experiments.studies.base import Study
from shadowattn.artifacts import read_json, sha256
from shadowattn.errors import InputError
from shadowattn.reporting.flags import answer_flags, quality_flags
from shadowattn.reporting.style import save

# Columns in which nothing means not a number.
_NUMBERS = (
    *("value", "low", "high", "error", "depth", "sigma", "published", "ranked_rows", "ranked_keys"),
    *("compile_s", "blob_bytes", "fp_ops", "int_ops", "peak_share", "dpu_mhz", "dpu_tiles", "activity"),
)
# Columns that look like numbers and are none.
_TEXTS = ("config_hash", "platform")
ROOT = Path(__file__).parents[1]


def read_reference(path: Path) -> pd.DataFrame:
    """Committed rows; an empty flag stays an empty string."""
    return pd.read_csv(
        path, keep_default_na=False, na_values={column: [""] for column in _NUMBERS}, dtype=dict.fromkeys(_TEXTS, str)
    )


def publish(run: Path, *, anyway: bool = False, other_command: bool = False, root: Path = ROOT) -> list[Path]:
    """Writes the CSV, where it comes from, and the figures of one finished run; returns what it wrote.

    `run`: its folder. Raises `InputError` where the rows are altered, where they are not of the code that is checked out (with
    `anyway` that is written down instead), and where the published rows are of another command, unless `other_command`.
    """
    rows, source = _read(run)
    reasons = objections(source)
    if reasons and not anyway:
        raise InputError(f"{run}: {'; '.join(reasons)}; measure again from a clean checkout, or publish with --anyway")
    if reasons:
        source = {**source, "published_although": reasons}
    written = [root / "results" / "reference" / f"{rows.experiment.iloc[0]}.csv"]
    earlier = read_json(sidecar(written[0]), "publish the run again").get("command") if sidecar(written[0]).is_file() else None
    if earlier not in (None, source["command"]) and not other_command:
        raise InputError(
            f"{run}: expected a run of `{earlier}`, like the rows that are published, got one of `{source['command']}`; to "
            "replace them, publish with --other-command"
        )
    write_csv(rows, written[0], source)
    return [*written, sidecar(written[0]), *redraw(written[0], root)]


def redraw(path: Path, root: Path = ROOT) -> list[Path]:
    """Draws figures of committed rows anew, into `docs`: the first, and those that a page names. Returns what it wrote.

    Raises `InputError` on rows that were altered since, or that nobody recorded.
    """
    if (condition := state(path)) not in ("ok", "stale"):
        raise InputError(f"{path}: {condition}; publish the run again")
    source = read_json(sidecar(path), "publish the run again")
    rows = read_reference(path)
    drawn = study_of(source).figures(rows)
    below = origin_line(rows, source["machine"], source["commit"], source["dirty"])
    pages = "".join(page.read_text() for page in [*root.glob("README.md"), *(root / "docs").glob("*.md")])
    written = []
    for place, (name, figure) in enumerate(drawn.items()):
        file = f"{path.stem}_{name}.png" if place else f"{path.stem}.png"
        if place == 0 or f"({file})" in pages or f"(docs/{file})" in pages:
            written.append(save(figure, root / "docs" / file, below=below))
    return written


def reflag(path: Path, root: Path = ROOT) -> list[Path]:
    """Sets the flags of committed losses and scores by today's rules, which may be newer than the rows; draws anew what changed,
    and returns what it wrote. The JSON beside the rows names the code of the rules.

    Raises `InputError` on rows that were altered since, or that nobody recorded.
    """
    if (condition := state(path)) not in ("ok", "stale"):
        raise InputError(f"{path}: {condition}; publish the run again")
    rows = read_reference(path)
    if "flag" not in rows:
        return []
    flags = answer_flags(rows.assign(flag=quality_flags(rows)))
    if flags.equals(rows.flag):
        return []
    source = read_json(sidecar(path), "publish the run again")
    as_written = pd.read_csv(path, dtype=str, keep_default_na=False)  # numbers keep their digits
    write_csv(as_written.assign(flag=flags), path, {**source, "flags_of_code": source_hash()})
    return [path, sidecar(path), *redraw(path, root)]


def study_of(source: Mapping[str, Any]) -> Study:
    """The study that made rows, by what they come from: as it was recorded, or as its command has it."""
    if "study" in source:
        return build(source["study"])
    config = composed(shlex.split(source["command"])[3:])  # after: python -m experiments.run
    complete(config)
    return build(config.study)


def check(root: Path = ROOT) -> Table:
    """Every committed CSV: how old, of which commit, and whether it is what was published and of today's code."""
    table = Table("rows of", "state", "age, days", "commit", "measured on", title="results/reference")
    for path in sorted((root / "results" / "reference").glob("*.csv")):
        condition, source = state(path), {}
        if condition in ("ok", "stale"):
            source = read_json(sidecar(path), "publish the run again")
        age = (datetime.now(UTC) - datetime.fromisoformat(source["finished"])).days if source else ""
        commit = f"{(source['commit'] or 'none')[:10]}{', changed' if source['dirty'] else ''}" if source else ""
        table.add_row(path.stem, condition, str(age), commit, source["machine"]["processor"] if source else "")
    return table


def _read(run: Path) -> tuple[pd.DataFrame, dict]:
    """Rows as they were written, and what they come from."""
    if not (run / "meta.json").is_file():
        raise InputError(f"expected the folder of a finished run, with meta.json in it, got {str(run)!r}")
    meta = read_json(run / "meta.json", "measure again")
    if meta.get("rows_sha256") != sha256(run / "rows.parquet"):
        raise InputError(f"{run}: rows.parquet is altered since it was written; measure again")
    return pd.read_parquet(run / "rows.parquet"), origin_of_run(meta)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a finished run")
    parser.add_argument("--anyway", action="store_true", help="though its code is not what is checked out; its JSON then says so")
    parser.add_argument("--other-command", action="store_true", help="though the published rows are of another command")
    parser.add_argument("--redraw", action="store_true", help="draw the figures of all published rows anew")
    parser.add_argument("--reflag", action="store_true", help="set the flags of published losses and scores by today's rules")
    parser.add_argument("--check", action="store_true", help="list what is published, and whether it is of today's code")
    options = parser.parse_args()
    if options.check + options.redraw + options.reflag + (options.run is not None) != 1:
        parser.error("expected one run to publish, --redraw, --reflag or --check")
    if options.check:
        show(check())
        return int(any(state(path) != "ok" for path in (ROOT / "results" / "reference").glob("*.csv")))
    try:
        if options.redraw or options.reflag:
            again = redraw if options.redraw else reflag
            published = sorted((ROOT / "results" / "reference").glob("*.csv"))
            written = [one for path in bar(published, "draw") for one in again(path)]
        else:
            written = publish(options.run, anyway=options.anyway, other_command=options.other_command)
        for path in written:
            print(path.relative_to(ROOT))
        if written:
            print("python -m experiments.pages writes the tables of the pages anew")
    except InputError as error:
        parser.exit(2, f"error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
