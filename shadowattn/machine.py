"""What the code runs on."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """The processor's name, as its maker gives it where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def cores() -> int:
    """Logical processors."""
    return os.cpu_count() or 1
