"""Energy that the processor itself counts (RAPL, by Linux's powercap), where the machine shows it; nothing is estimated here."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shadowattn.errors import InputError

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Counter:
    """The counter of one processor package, which begins at 0 again after `range_uj` microjoules."""

    path: Path
    range_uj: int

    def read_uj(self) -> int:
        return int(self.path.read_text())


def counters(root: Path = POWERCAP) -> tuple[Counter, ...]:
    """Those of all packages; none where the machine has none, or lets nobody but the administrator read them."""
    found = []
    for folder in sorted(root.glob("intel-rapl:*")):  # AMD's are called so too
        try:
            if (folder / "name").read_text().startswith("package"):  # its parts would count twice
                counter = Counter(folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()))
                counter.read_uj()
                found.append(counter)
        except (OSError, ValueError):
            continue
    return tuple(found)


def energy_source(root: Path = POWERCAP) -> str:
    """`rapl`, or `none` where energy cannot be measured here. What is simulated says `model`."""
    return "rapl" if counters(root) else "none"


def joules(call: Callable[[], object], *, seconds: float, root: Path = POWERCAP) -> float:
    """Energy of one call, J: of all packages, over calls that take at least so long together, whatever else the machine does.

    The counters move about once a millisecond, and begin anew after some minutes at full power: 1 to 60 seconds are sound. Raises
    `InputError` where there are no counters.
    """
    packages = counters(root)
    if not packages:
        raise InputError(
            f"energy: expected RAPL counters that can be read in {root}, found none; run where Linux's powercap shows them "
            "(often to the administrator alone)"
        )
    before, calls, start = [package.read_uj() for package in packages], 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - start < seconds:
        call()
        calls += 1
    spent = sum((package.read_uj() - first) % package.range_uj for package, first in zip(packages, before, strict=True))
    return spent / 1e6 / calls
