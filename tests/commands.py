"""Commands of the project, each in a process of its own, which finds imported what takes seconds to import."""

import atexit
import multiprocessing.process
import os
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.own_process import fresh_processes

ROOT = Path(__file__).parents[1]
_MOST_S = 300
_STREAMS = {"stdout": 1, "stderr": 2}


def run_python(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """What `python arguments` does, in a process begun by the system. A launcher by joblib needs one: in a process of
    `run_module`, loky waits for ever.
    """
    command, environment = [sys.executable, *arguments], os.environ | environment
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_MOST_S, check=False)


def run_module(module: str, *arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """What `python -m module arguments` does in a folder, with the environment of now and what is given beside it; libraries
    have read theirs before.
    """
    with TemporaryDirectory() as streams:
        of = (module, arguments, folder, os.environ | environment, Path(streams))
        process = fresh_processes().Process(target=_run, args=of)
        process.start()
        process.join(_MOST_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([module, *arguments], _MOST_S)
        said = {name: (Path(streams) / name).read_text() for name in _STREAMS}
        return subprocess.CompletedProcess([module, *arguments], process.exitcode, **said)


def _run(module: str, arguments: tuple[str, ...], folder: Path, environment: dict[str, str], streams: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = str(folder)  # where processes of this one begin
    for name, number in _STREAMS.items():
        os.dup2(os.open(streams / name, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = [module, *arguments]
    sys.path[:0] = [str(folder), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out
