"""What a run was made on: in every `meta.json`."""

import platform
import subprocess
from pathlib import Path

import torch

from shadowattn.machine import cores, processor


def machine() -> dict[str, str | int | bool | None]:
    """Processor, threads and the state of the code."""
    return {
        "processor": processor(),
        "cores": cores(),
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str | None:
    """git's answer for the folder of this file, or None outside a checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
