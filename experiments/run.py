"""The only entry point for experiments: reads the command line, and runs every job of it.

python -m experiments.run --help

Nothing here imports torch: a misspelt name is answered at once.
"""

import copy
import os
import shlex
import sys
import tempfile
import textwrap
import traceback

# libgomp's spinning threads would fight OpenVINO's for the cores; read once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Hydra's own report of an error is five lines; with this it raises, and `main` prints one.
os.environ.setdefault("HYDRA_FULL_ERROR", "1")

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from string import Template

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import sweeps
from experiments.compose import CONF, choices, composed, settable, typed
from experiments.config import ALWAYS, Config
from experiments.errors import ShardDoneError
from experiments.overrides import answer, check_known, check_used
from experiments.part_settings import complete, declared
from experiments.part_targets import check_modules
from shadowattn.errors import InputError

REUSE = ("same", "any")
# Hydra's own options that mean something here; what follows those of the second kind.
_FLAGS = ("-m", "--multirun", "-h", "--help", "--hydra-help")
_VALUED = {"--cfg": "job", "-c": "job", "--config-dir": "a folder", "-cd": "a folder"}


def run(config: DictConfig, *, command: str = "", overrides: Sequence[str] = ()) -> Path:
    """Measures what a composed configuration asks for, unless that is done, and returns the run's folder.

    `command` is what `meta.json` says repeats it, `overrides` what was asked for, which the study has to use. Raises `InputError`
    on what is misspelt or cannot be measured as asked, before anything is written.
    """
    config = _complete(config)
    needs = declared(config.study._target_, "needs")
    if needs is not None:  # else known once it is imported
        check_used(config, overrides, needs)
    from experiments.job import run_job  # imports torch

    return run_job(config, command, overrides)


def main() -> None:
    """Runs every job, and turns what a user can cause into one line a job and exit status 2."""
    try:
        arguments = _options_first([settable(one) for one in sys.argv[1:]])
    except InputError as error:
        _print_error(str(error))
        sys.exit(2)
    failed = False
    sweeps.Begun.sweeps.clear()

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def job(config: DictConfig) -> None:
        nonlocal failed
        hydra_config, swept = HydraConfig.get(), HydraConfig.get().mode == RunMode.MULTIRUN
        overrides = [typed(one) for one in hydra_config.overrides.task]
        outcome = {"overrides": overrides, "folder": "", "error": sweeps.STOPPED}
        name = f"job {hydra_config.job.num} ({' '.join(overrides)}): " if swept else ""
        if swept:
            sweeps.record(hydra_config.job.num, outcome)
        try:
            outcome["folder"], outcome["error"] = str(_job(config)), ""
        except InputError as error:  # here and not around `job`: the other jobs of a sweep go on
            outcome["error"] = _one_line(error)
            _print_error(f"{name}{outcome['error']}")
            failed = True
        except (Exception, SystemExit) as error:  # a defect: its trace is of use
            if not swept:
                raise
            outcome["error"] = f"{type(error).__name__}: {_one_line(error)}"
            traceback.print_exc()
            _print_error(f"{name}{outcome['error']}")
            failed = True
        finally:
            if swept:
                sweeps.record(hydra_config.job.num, outcome)

    sys.argv = [sys.argv[0], *arguments]
    try:
        if {"--help", "-h"} & set(arguments):
            _print_help(*_parted([one for one in arguments if one not in ("--help", "-h")]))
        elif "--cfg" in arguments and arguments[arguments.index("--cfg") + 1 :][:1] == ["job"]:
            at = arguments.index("--cfg")
            _print_config(*_parted(arguments[:at] + arguments[at + 2 :]))
        else:
            job()
    except InputError as error:
        _print_error(_one_line(error))
        sys.exit(2)
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        if _is_ours(error):
            raise
        message = _one_line(error)
        # Hydra makes a folder of its own among the results before the first job.
        if isinstance(error, OSError) and not isinstance(error, HydraException):
            message = _unwritable(str(error.filename).split("/sweeps")[0], error)
        _print_error(answer(message, [typed(one) for one in arguments]) or message)
        failed = True
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not sweeps.Begun.sweeps:
            raise
        # The launcher's: those of jobs are caught there. It goes on about its workers for many lines.
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        _print_error(f"the launcher of the sweep ended early ({reason}); the same command measures what is missing")
        failed = True
    for folder, settings in sweeps.Begun.sweeps.items():
        failed = _finish_sweep(folder, settings) or failed
    if failed:
        sys.exit(2)


def _finish_sweep(folder: Path, settings: DictConfig) -> bool:
    """Shows what a sweep's jobs measured and names those that failed, unless none began; whether any failed."""
    failed = sweeps.finish(folder, sweeps.planned(settings)) if any(folder.glob("job_*.json")) else {}
    for name, error in failed.items():
        if error in (sweeps.STOPPED, sweeps.NOT_BEGUN):  # the others said it themselves
            _print_error(f"{name}: {error}")
    if failed:
        _print_error(f"{len(failed)} jobs of the sweep failed, the others are done: {'; '.join(failed)}")
    return bool(failed)


def _job(config: DictConfig) -> Path | str:
    """One job of the command line."""
    overrides = list(HydraConfig.get().overrides.task)
    try:
        return run(config, command=_command(overrides), overrides=overrides)
    except ShardDoneError as done:
        print(done, file=sys.stderr)
        return ""


def _complete(config: DictConfig) -> DictConfig:
    """What needs no import is checked; every part gets all of its settings."""
    _check_settings(config)
    check_known(config)
    check_modules(config)
    config = copy.deepcopy(config)
    complete(config)
    return config


def _check_settings(config: DictConfig) -> None:
    for key in (one.name for one in fields(Config)):
        if key not in config:  # missing, or deleted
            raise InputError(f"{key}: expected a choice, got none; leave out ~{key}, or set {key}=NAME")
    if not OmegaConf.is_dict(config.study) or not isinstance(config.study.get("_target_"), str):
        raise InputError(
            f"study: expected a study by its class, got {config.study!r}; choose one with +exp=NAME or study._target_=MODULE.NAME"
        )
    if config.threads is not None and config.threads < 1:
        raise InputError(f"threads: expected at least 1, or null for all cores, got {config.threads}")
    if config.reuse not in REUSE:
        raise InputError(f"reuse: expected one of {', '.join(REUSE)}, got {config.reuse!r}")
    for key in ("retention", "retentions"):
        for value in [config[key]] if key == "retention" else config[key]:
            if not 0 < value <= 1:
                raise InputError(f"{key}: expected a share of the visible keys, in (0, 1], got {value:g}")
    if len(set(config.retentions)) < len(config.retentions):
        raise InputError(f"retentions: expected each once, got {list(config.retentions)}; leave out what stands twice")
    _check_results(config.paths.results)


def _check_results(results: str) -> None:
    """Raises `InputError` where results cannot be written; leaves nothing behind."""
    if not results:
        raise InputError("paths.results: expected a folder to write to, got an empty name")
    folder = Path(results).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise InputError(_unwritable(results, error)) from error


def _unwritable(results: str, error: OSError) -> str:
    return (
        f"paths.results: expected a folder to write to, got {results!r} ({error.strerror}); set paths.results=FOLDER to one that "
        "is not there yet or that you may write to"
    )


def _options_first(arguments: list[str]) -> list[str]:
    """Options before overrides, as argparse wants them. Raises `InputError` on an option that there is not."""
    options, overrides, left = [], [], list(arguments)
    while left:
        one = left.pop(0)
        name = one.partition("=")[0]
        if not one.startswith("-"):
            overrides.append(one)
        elif name in _FLAGS or (name in _VALUED and "=" in one):
            options.append(one)
        elif name in _VALUED:
            if not left or "=" in left[0] or left[0].startswith("-"):
                raise InputError(f"{one}: expected {_VALUED[name]} after it, got {left[0] if left else 'nothing'}")
            options += ["--cfg" if one == "-c" else one, left.pop(0)]
        else:
            raise InputError(f"{one}: expected one of {', '.join((*_FLAGS, *_VALUED))}, or a setting as KEY=VALUE")
    return [*options, *overrides]


def _parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Overrides, and folders of further configuration. Raises `InputError` on other options."""
    overrides, folders, left = [], [], list(arguments)
    while left:
        one = left.pop(0)
        if one in ("--config-dir", "-cd"):
            folders.append(left.pop(0))
        elif one.startswith("--config-dir="):
            folders.append(one.partition("=")[2])
        elif one.startswith("-"):
            raise InputError(f"{one}: expected overrides and --config-dir beside --help and --cfg job; leave it out")
        else:
            overrides.append(one)
    return overrides, folders


def _is_ours(error: BaseException) -> bool:
    """Whether an error was raised while a job ran, and not by Hydra beforehand: that is a defect."""
    return any(Path(frame.filename).name == "job.py" for frame in traceback.extract_tb(error.__traceback__))


def _print_help(overrides: list[str], folders: list[str]) -> None:
    """Hydra's page, in a second instead of four: Hydra also lists all groups, which the template does not ask for."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        template = hydra.compose("config", return_hydra_config=True).hydra.help.template
    lines = [
        line
        for group, names in choices(folders).items()
        for line in textwrap.wrap(", ".join(names), 112, initial_indent=f"{group:15}", subsequent_indent=" " * 15)
    ]
    page = {"CHOICES": "\n".join(lines), "CONFIG": OmegaConf.to_yaml(_needed(composed(overrides, folders)))}
    print(Template(template).substitute(page))


def _print_config(overrides: list[str], folders: list[str]) -> None:
    """What a job would be asked: the study's own settings and what it needs, with every default."""
    print(OmegaConf.to_yaml(_needed(composed(overrides, folders))), end="")


def _needed(config: DictConfig) -> DictConfig:
    config = _complete(config)
    needs = declared(config.study._target_, "needs")
    return config if needs is None else OmegaConf.masked_copy(config, [key for key in config if key in (*needs, *ALWAYS)])


def _command(overrides: list[str]) -> str:
    """What repeats this job, as it was typed."""
    sources = HydraConfig.get().runtime.config_sources
    folders = [source.path for source in sources if source.provider == "command-line"]
    options = [part for folder in folders for part in ("--config-dir", folder)]
    return shlex.join(["python", "-m", "experiments.run", *options, *map(typed, overrides)])


def _print_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def _one_line(error: BaseException) -> str:
    """A message and, for Hydra, its cause: Hydra names the key in one and the reason in the other."""
    messages = [str(error), str(error.__cause__) if isinstance(error, HydraException) and error.__cause__ else ""]
    return " ".join(" ".join(messages).split())


if __name__ == "__main__":
    main()
