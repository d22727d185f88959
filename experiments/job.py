"""One job of the command line: compose → offline → graphs → evaluate → rows, table, plots.

A run's folder holds results of one code (`code.json`). A finished run of other code moves aside until today's is done.
"""

import shutil
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pandas as pd
import transformers
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.machine import machine
from experiments.progress import say
from experiments.setup import Setup, needs_bank, on_device, prepare
from experiments.source import Code
from experiments.stages import ShardDoneError, build_bank, run_offline
from shadowattn.artifacts import read_json, sha256, versions, write_json
from shadowattn.kernels import native
from shadowattn.reporting.rows import write_rows
from shadowattn.runs import load_run


def run_job(config: DictConfig, study_module: str, command: str) -> None:
    """Measures what a configuration asks for, or shows what was measured before, and prints its table.

    `study_module` has `measure`, `draw` and `table`; `command` repeats the job. Raises `InputError`.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    started = datetime.now(UTC)
    study = import_module(study_module)
    setup = prepare(config)
    results = Path(config.paths.results)
    folder = results / "runs" / config.experiment / setup.config_hash
    say(
        f"{config.experiment} {setup.config_hash}: {setup.loaded.name} on {setup.corpus.name}, estimate on "
        f"{setup.device.label}, kernel {setup.kernel}{_kernel_level(setup.kernel)}"
    )
    title = f"{config.experiment} · {setup.loaded.name} on {setup.corpus.name}"
    others = _differences(folder, setup.code)
    if (folder / "meta.json").exists() and (not others or config.reuse == "any"):
        rows = load_run(folder).rows
        if others:
            remark = f"measured with other code ({', '.join(others)})"
            rows = rows.assign(flag=[f"{flag}; {remark}" if flag else remark for flag in rows.flag])
            title = f"{title} · {remark}"
        say(f"done before{', ' + remark if others else ''}; to measure again: rm -r {folder}")
    else:
        replaced = results / "replaced" / config.experiment / setup.config_hash
        if others:
            _set_aside(folder, replaced, others)
        try:
            rows = _measure(setup, study, folder, started, command)
        except ShardDoneError as done:
            say(str(done))
            return
        shutil.rmtree(replaced, ignore_errors=True)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(study.table(rows, title))
    for path in sorted(folder.glob("*.png")):
        print(path)


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


def _kernel_level(kernel: str) -> str:
    return f" ({native.LEVELS[native.level()]})" if kernel == "native" else ""


def _measure(setup: Setup, study: ModuleType, folder: Path, started: datetime, command: str) -> pd.DataFrame:
    """All stages; `meta.json` comes last and makes the run count."""
    on = machine()  # before anything is measured, with the commit that was checked out then
    offline = run_offline(setup)
    write_json(folder / "code.json", asdict(setup.code))  # before the first part of a result, and after a shard has left
    bank, bank_name = None, None
    if any(needs_bank(method.estimator) and not on_device(method) for method in setup.methods.values()):
        bank, bank_name = build_bank(setup, offline)
    rows = write_rows(study.measure(setup, offline, bank, folder), folder / "rows.parquet")
    study.draw(setup, offline, rows, folder)
    meta = {
        "experiment": setup.config.experiment,
        "command": command,
        "config_hash": setup.config_hash,
        "config": OmegaConf.to_container(setup.config, resolve=True),
        "code": asdict(setup.code),
        "model": {"name": setup.loaded.name, "fingerprint": setup.loaded.fingerprint} | asdict(setup.shape),
        "data": {"name": setup.corpus.name, "sha256": setup.corpus.sha256},
        "stages": [*offline.stages, bank_name],
        "estimate_device": asdict(setup.device),
        "scale_fit": offline.observations.fit(offline.grid),
        "kernel": setup.kernel + _kernel_level(setup.kernel),
        "machine": on,
        "versions": versions(),
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows_sha256": sha256(folder / "rows.parquet"),
    }
    write_json(folder / "meta.json", meta)
    return rows
