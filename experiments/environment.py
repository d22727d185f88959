"""What a run was made on, and the state of its code: in every `meta.json`."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from shadowattn.machine import cores, cpu, memory_bytes, processor

_ROOT = Path(__file__).parents[1]
# What decides a number; published rows and pages may change beside it.
_CODE = ("shadowattn", "experiments", "conf", "CMakeLists.txt", "pyproject.toml", "constraints.txt")


def describe_machine(gpu: str | None = None) -> dict[str, Any]:
    """Processor, memory, threads, the `gpu` that the model is on, if any, and the commit with whether the code differs from it;
    both None outside a checkout.
    """
    changed = _git("status", "--porcelain", "--", *_CODE)
    return {
        "processor": processor(),
        "cpu": cpu(),
        "cores": cores(),
        **({} if gpu is None else {"gpu": gpu}),
        "memory_bytes": memory_bytes(),
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.release()}",
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if changed is None else bool(changed),
    }


def _git(*arguments: str) -> str | None:
    """git's answer for the checkout that this file is in, or None where it is installed: a checkout around that is another's."""
    if not (_ROOT / "pyproject.toml").is_file():
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
