"""The only entry point for experiments: compose → offline → graphs → evaluate → rows, table, plots.

python -m experiments.run --help
"""

import os
import sys

# libgomp's spinning threads would fight OpenVINO's for the cores; read once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Hydra's own report of an error is five lines; with this it raises, and `main` prints one.
os.environ.setdefault("HYDRA_FULL_ERROR", "1")

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import hydra
import pandas as pd
import transformers
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from experiments import (
    allocator_study,
    fig9,
    gates,
    graphs_study,
    latency_profile,
    offline_study,
    query_block,
    recall_study,
    scheduler_study,
    selfcheck,
    simulation_study,
    study,
    validate_simulator,
)
from experiments import config as schema
from experiments.machine import machine
from experiments.progress import say
from experiments.setup import Setup, needs_bank, on_device, prepare
from experiments.stages import ShardDoneError, build_bank, run_offline
from shadowattn.artifacts import read_json, sha256, versions, write_json
from shadowattn.errors import InputError
from shadowattn.kernels import native
from shadowattn.reporting.rows import write_rows

schema.register()

# What a run measures; each module has `measure`, `draw` and `table`.
STUDIES = {
    "quality": study,
    "gates": gates,
    "offline": offline_study,
    "allocators": allocator_study,
    "query_block": query_block,
    "latency_profile": latency_profile,
    "fig9": fig9,
    "selfcheck": selfcheck,
    "graphs": graphs_study,
    "recall": recall_study,
    "schedulers": scheduler_study,
    "simulation": simulation_study,
    "validate_simulator": validate_simulator,
}


@hydra.main(version_base="1.3", config_path=str(Path(__file__).parents[1] / "conf"), config_name="config")
def run(config: DictConfig) -> None:
    """One run: everything that a composed configuration asks for."""
    try:
        _run(config)
    # Here and not in `main`: Hydra would print a line of its own before letting them through.
    except InputError as error:
        _fail(error)
    except InstantiationException as error:  # what Hydra makes of an error in a part that it builds
        if not isinstance(error.__cause__, InputError):
            raise
        _fail(error.__cause__)


def _run(config: DictConfig) -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    started = datetime.now(UTC)
    if config.study not in STUDIES:
        raise InputError(f"study: expected one of {', '.join(STUDIES)}, got {config.study!r}")
    setup = prepare(config)
    folder = Path(config.paths.results) / "runs" / config.experiment / setup.config_hash
    say(
        f"{config.experiment} {setup.config_hash}: {setup.loaded.name} on {setup.corpus.name}, estimate on "
        f"{setup.device.label}, kernel {setup.kernel}{_kernel_level(setup.kernel)}"
    )
    if (folder / "meta.json").exists():
        rows = _finished_rows(folder)
        say(f"done before; to measure again: rm -r {folder}")
    else:
        try:
            rows = _measure(setup, STUDIES[config.study], folder, started)
        except ShardDoneError as done:
            say(str(done))
            return
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(STUDIES[config.study].table(rows, f"{config.experiment} · {setup.loaded.name} on {setup.corpus.name}"))
    for path in sorted(folder.glob("*.png")):
        print(path)


def _kernel_level(kernel: str) -> str:
    return f" ({native.LEVELS[native.level()]})" if kernel == "native" else ""


def _measure(setup: Setup, study: ModuleType, folder: Path, started: datetime) -> pd.DataFrame:
    """All stages; `meta.json` comes last and makes the run count."""
    offline = run_offline(setup)
    bank, bank_name = None, None
    if any(needs_bank(method.estimator) and not on_device(method) for method in setup.methods.values()):
        bank, bank_name = build_bank(setup, offline)
    rows = write_rows(study.measure(setup, offline, bank, folder), folder / "rows.parquet")
    study.draw(setup, offline, rows, folder)
    meta = {
        "experiment": setup.config.experiment,
        "config_hash": setup.config_hash,
        "config": OmegaConf.to_container(setup.config, resolve=True),
        "model": {"name": setup.loaded.name, "fingerprint": setup.loaded.fingerprint} | asdict(setup.shape),
        "data": {"name": setup.corpus.name, "sha256": setup.corpus.sha256},
        "stages": [*offline.stages, bank_name],
        "estimate_device": asdict(setup.device),
        "scale_fit": offline.observations.fit(offline.grid),
        "kernel": setup.kernel + _kernel_level(setup.kernel),
        "machine": machine(),
        "versions": versions(),
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows_sha256": sha256(folder / "rows.parquet"),
    }
    write_json(folder / "meta.json", meta)
    return rows


def _finished_rows(folder: Path) -> pd.DataFrame:
    remedy = f"measure again with: rm -r {folder}, then the same command"
    meta = read_json(folder / "meta.json", remedy)
    path = folder / "rows.parquet"
    if not path.is_file() or sha256(path) != meta.get("rows_sha256"):
        raise InputError(f"{path}: missing, altered or cut short; {remedy}")
    return pd.read_parquet(path)


def main() -> None:
    """Runs, and turns what a user can cause into one line and exit status 2."""
    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:
        _fail(error)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def _fail(error: Exception) -> NoReturn:
    print(f"error: {_one_line(error)}", file=sys.stderr)
    sys.exit(2)


def _one_line(error: BaseException) -> str:
    """A message and, for Hydra, its cause: Hydra names the key in one and the reason in the other."""
    messages = [str(error), str(error.__cause__) if isinstance(error, HydraException) and error.__cause__ else ""]
    return " ".join(" ".join(messages).split())


if __name__ == "__main__":
    main()
