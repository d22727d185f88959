"""One run: a study measured into a folder of its own, or found there.

A run's folder holds results of one code (`code.json`), and says what was asked and when (`begun.json`). A finished run of other
code moves aside until today's is done.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import transformers
from hydra.utils import get_object
from omegaconf import DictConfig

from experiments.config import Config
from experiments.environment import describe_machine
from experiments.lab import Lab
from experiments.overrides import check_used
from experiments.part_building import build
from experiments.part_targets import check_targets
from experiments.progress import say, show
from experiments.provenance import origin_line
from experiments.refusals import check, check_divergence, check_place
from experiments.source import Code
from experiments.studies.base import Study
from shadowattn.artifacts import read_json, sha256, versions, write_json
from shadowattn.errors import InputError
from shadowattn.reporting.rows import write_rows
from shadowattn.reporting.style import save
from shadowattn.runs import load_run


def run_job(config: DictConfig, command: str, overrides: Sequence[str] = ()) -> Path:
    """Measures what a complete configuration asks for, or finds it measured, prints its table, and returns the run's folder.

    `command` repeats the run. Raises `InputError` on what cannot be measured as asked, before anything is written, and
    `ShardDoneError` where other shards' work is missing.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    started = datetime.now(UTC)
    check_targets({"study": config.study})
    kind = get_object(config.study._target_)
    if not (isinstance(kind, type) and issubclass(kind, Study)):
        raise InputError(f"study._target_: expected a class derived from Study, got {config.study._target_}")
    if unknown := sorted(set(kind.needs) - {one.name for one in fields(Config)}):
        raise InputError(f"{config.study._target_}.needs: expected settings of the configuration, got {', '.join(unknown)}")
    check_used(config, overrides, kind.needs)
    study = build(config.study)
    check_targets({key: config[key] for key in study.needs})
    lab = Lab(config, study.needs)
    check_place(lab, kind)
    check_divergence(lab, study)
    study.check(lab)
    check(lab)
    name = lab.config_hash(study.inputs())
    lab.folder = lab.root / "runs" / config.experiment / name
    say(f"{config.experiment} {name}{_how(lab)}")
    for which in lab.int8:
        say(which)
    title = " · ".join(filter(None, (config.experiment, lab.subject)))
    others = _differences(lab.folder, lab.code)
    if (lab.folder / "meta.json").exists() and (not others or config.reuse == "any"):
        rows = load_run(lab.folder).rows
        if others:
            remark = f"measured with other code ({', '.join(others)})"
            rows = rows.assign(flag=[f"{flag}; {remark}" if flag else remark for flag in rows.flag])
            title = f"{title} · {remark}"
        say(f"done before{', ' + remark if others else ''}; to measure again: rm -r {lab.folder}")
    else:
        replaced = lab.root / "replaced" / config.experiment / name
        if others:
            _set_aside(lab.folder, replaced, others)
        rows = _measure(study, lab, started, command)
        shutil.rmtree(replaced, ignore_errors=True)
    show(study.table(rows, title))
    for path in sorted(lab.folder.glob("*.png")):
        print(path)
    return lab.folder


def _how(lab: Lab) -> str:
    subject = f": {lab.subject}" if lab.subject else ""
    device = f", model on {lab.gpu}" if lab.gpu else f", estimate on {lab.device.label}" if "device" in lab.needs else ""
    return subject + device + (f", kernel {lab.kernel_level}" if "kernel" in lab.needs else "")


def _differences(folder: Path, code: Code) -> list[str]:
    """In what a run's folder differs from today's code; nothing where there is none."""
    if not folder.exists():
        return []
    recorded = folder / "code.json"
    if not recorded.exists():
        return ["unknown, of a version that did not record it"]
    return code.differences(read_json(recorded, f"measure again with: rm -r {folder}"))


def _set_aside(folder: Path, replaced: Path, others: list[str]) -> None:
    """Makes room: a finished run is kept elsewhere until its successor is done; parts of an unfinished one are of no use."""
    finished = (folder / "meta.json").exists()
    if finished or not replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        replaced.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(replaced)
    else:
        shutil.rmtree(folder)
    kept = f"; until that is done the earlier results are in {replaced}, and reuse=any shows such results as they are"
    say(f"{folder.name}: measured with other code ({', '.join(others)}), measuring again{kept if finished else ''}")


def _measure(study: Study, lab: Lab, started: datetime, command: str) -> pd.DataFrame:
    """Rows and figures; `begun.json` comes first, `meta.json` last and makes the run count."""
    folder, on = lab.folder, describe_machine(lab.gpu)  # before anything is measured, with the commit that was checked out then
    asked = {"command": command, "started": started.isoformat(timespec="seconds")}
    write_json(folder / "code.json", asdict(lab.code))
    write_json(folder / "begun.json", asked | lab.meta())
    try:
        measured = study.measure(lab)
    except InputError:
        # Nothing half-written is left of what came to nothing; but other shards may be at work in the same folder.
        if lab.of("shard").count == 1 and {path.name for path in folder.iterdir()} <= {"code.json", "begun.json"}:
            shutil.rmtree(folder)
            _remove_empty(folder.parent, lab.root.parent)
        raise
    rows = write_rows(measured, folder / "rows.parquet")
    for name, figure in study.figures(rows).items():
        save(figure, folder / f"{name}.png", below=origin_line(rows, on, on["git_commit"], on["git_dirty"]))
    meta = {
        "experiment": folder.parent.name,
        **asked,
        "config_hash": folder.name,
        **lab.meta(),
        "code": asdict(lab.code),
        "machine": on,
        "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows_sha256": sha256(folder / "rows.parquet"),
    }
    write_json(folder / "meta.json", meta)
    return rows


def _remove_empty(folder: Path, stop: Path) -> None:
    """Removes folders that this run made and that hold nothing."""
    while folder != stop and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
