"""The only entry point for experiments: reads the command line, and hands every job of it to `experiments.job`.

python -m experiments.run --help

Nothing here imports torch: a misspelt name is answered at once.
"""

import os
import shlex
import sys
import tempfile
import traceback

# libgomp's spinning threads would fight OpenVINO's for the cores; read once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Hydra's own report of an error is five lines; with this it raises, and `main` prints one.
os.environ.setdefault("HYDRA_FULL_ERROR", "1")

from pathlib import Path
from string import Template

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import config as schema
from experiments.overrides import answer, check_known
from experiments.targets import check_modules
from shadowattn.errors import InputError

schema.register()

# What a run measures; each module has `measure`, `draw` and `table`.
STUDIES = {
    "quality": "experiments.study",
    "gates": "experiments.gates",
    "offline": "experiments.offline_study",
    "allocators": "experiments.allocator_study",
    "query_block": "experiments.query_block",
    "latency_profile": "experiments.latency_profile",
    "fig9": "experiments.fig9",
    "selfcheck": "experiments.selfcheck",
    "graphs": "experiments.graphs_study",
    "recall": "experiments.recall_study",
    "schedulers": "experiments.scheduler_study",
    "simulation": "experiments.simulation_study",
    "validate_simulator": "experiments.validate_simulator",
}
REUSE = ("same", "any")
_CONF = str(Path(__file__).parents[1] / "conf")


def main() -> None:
    """Runs every job, and turns what a user can cause into one line a job and exit status 2."""
    failed: list[str] = []

    @hydra.main(version_base="1.3", config_path=_CONF, config_name="config")
    def run(config: DictConfig) -> None:
        # Here and not around `run`: Hydra would print a line of its own, and a sweep would end with its first failure.
        try:
            _run(config)
        except InputError as error:
            failed.append(_report(error))
        except InstantiationException as error:  # what Hydra makes of an error in a part that it builds
            if not isinstance(error.__cause__, InputError):
                raise
            failed.append(_report(error.__cause__))

    try:
        if _asks_for_help(sys.argv[1:]):
            _print_help([argument for argument in sys.argv[1:] if not argument.startswith("-")])
        else:
            run()
    except (HydraException, OmegaConfBaseException) as error:
        message = _one_line(error)
        _print_error(answer(message) or message)
        sys.exit(2)
    except OSError as error:
        passed = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        if "sweep" not in passed or "run_job" in passed:
            raise
        # Hydra makes a folder of its own among the results before the first job.
        _print_error(_unwritable(str(error.filename).removesuffix("/.multirun"), error))
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    if failed:
        if any(failed):
            _print_error(f"{len(failed)} jobs of the sweep failed, the others are done: {'; '.join(failed)}")
        sys.exit(2)


def _asks_for_help(arguments: list[str]) -> bool:
    options = {argument for argument in arguments if argument.startswith("-")}
    return bool(options) and options <= {"--help", "-h"}


def _print_help(overrides: list[str]) -> None:
    """Hydra's page, in a second instead of four: Hydra also lists all groups, which the template does not ask for."""
    with hydra.initialize_config_dir(_CONF, version_base="1.3"):
        template = hydra.compose("config", overrides, return_hydra_config=True).hydra.help.template
        print(Template(template).substitute(CONFIG=OmegaConf.to_yaml(hydra.compose("config", overrides))))


def _run(config: DictConfig) -> None:
    """What needs no import is checked first, then everything that a composed configuration asks for."""
    if config.study not in STUDIES:
        raise InputError(f"study: expected one of {', '.join(STUDIES)}, got {config.study!r}")
    if config.reuse not in REUSE:
        raise InputError(f"reuse: expected one of {', '.join(REUSE)}, got {config.reuse!r}")
    _check_retentions(config)
    _check_results(config.paths.results)
    check_known(config)
    check_modules(config)
    from experiments.job import run_job  # imports torch

    run_job(config, STUDIES[config.study], _command())


def _check_retentions(config: DictConfig) -> None:
    for key in ("retention", "retentions", "latency.retentions"):
        given = OmegaConf.select(config, key)
        for value in [given] if key == "retention" else given:
            if not 0 < value <= 1:
                raise InputError(f"{key}: expected a share of the visible keys, in (0, 1], got {value:g}")


def _check_results(results: str) -> None:
    """Raises `InputError` where results cannot be written; leaves nothing behind."""
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


def _command() -> str:
    """What repeats this job."""
    runtime = HydraConfig.get()
    folders = [source.path for source in runtime.runtime.config_sources if source.provider == "command-line"]
    options = [part for folder in folders for part in ("--config-dir", folder)]
    return shlex.join(["python", "-m", "experiments.run", *options, *runtime.overrides.task])


def _report(error: Exception) -> str:
    """Prints an error; of a sweep with its job, which is returned, else nothing."""
    runtime = HydraConfig.get()
    job = f"job {runtime.job.num} ({' '.join(runtime.overrides.task)})" if runtime.mode == RunMode.MULTIRUN else ""
    _print_error(f"{job}: {_one_line(error)}" if job else _one_line(error))
    return job


def _print_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def _one_line(error: BaseException) -> str:
    """A message and, for Hydra, its cause: Hydra names the key in one and the reason in the other."""
    messages = [str(error), str(error.__cause__) if isinstance(error, HydraException) and error.__cause__ else ""]
    return " ".join(" ".join(messages).split())


if __name__ == "__main__":
    main()
