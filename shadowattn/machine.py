"""What the code runs on."""

import ctypes
import os
import platform
import sys
from pathlib import Path

# /proc/cpuinfo's names, of x86 and of Arm, and ours.
_FIELDS = {
    "vendor_id": "vendor",
    "CPU implementer": "vendor",
    "model name": "name",
    "cpu family": "family",
    "CPU architecture": "family",
    "model": "model",
    "CPU part": "model",
    "stepping": "stepping",
    "CPU revision": "stepping",
}


def cpu() -> dict[str, str]:
    """Vendor, name, family, model and stepping, as far as the system tells: makers give one name to several generations."""
    try:
        first = Path("/proc/cpuinfo").read_text().strip().split("\n\n")[0]
    except OSError:
        return {"name": platform.processor() or platform.machine()}
    pairs = [line.split(":", 1) for line in first.splitlines() if ":" in line]
    details = {_FIELDS[name.strip()]: value.strip() for name, value in pairs if name.strip() in _FIELDS}
    return {"name": platform.machine()} | details


def processor() -> str:
    """The processor's name with its family, model and stepping, which tell generations of one name apart."""
    details = cpu()
    numbers = ", ".join(f"{name} {details[name]}" for name in ("family", "model", "stepping") if name in details)
    return f"{details['name']} ({numbers})" if numbers else details["name"]


def cores() -> int:
    """Logical processors."""
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def return_freed_memory() -> None:
    """Hands freed memory back to the system, which glibc would keep for later; does nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
