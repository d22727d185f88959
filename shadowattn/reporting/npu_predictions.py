"""Times measured on an NPU beside what its compiler's cost model predicted, and the launch cost that follows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Compared:
    """One case: measured and predicted microseconds; `unpriced` names what the prediction leaves out."""

    case: str
    measured_us: float
    predicted_us: float
    unpriced: str


def compared(median_ms: Mapping[str, float], compiled: pd.DataFrame, architecture: str) -> list[Compared]:
    """The cases that ran and that were compiled for `architecture`, such as 4000; rows of `+exp=npu_compile`."""
    forms = compiled[(compiled.part == "form") & (compiled.platform == architecture.removeprefix("NPU"))]
    predicted = forms[forms.value.notna()].set_index("method")
    return [
        Compared(case, 1e3 * ms, float(predicted.value[case]), str(predicted.unpriced[case]))
        for case, ms in median_ms.items()
        if ms == ms and case in predicted.index
    ]


def launch_cost(cases: list[Compared]) -> tuple[float, float] | None:
    """(µs of a launch, measured µs for each predicted one), a line by least squares through the cases without unpriced parts.

    None with fewer than three of them, or where all have one predicted time.
    """
    priced = [one for one in cases if not one.unpriced]
    predicted = np.array([one.predicted_us for one in priced])
    if len(priced) < 3 or np.ptp(predicted) == 0:
        return None
    slope, fixed = np.polyfit(predicted, [one.measured_us for one in priced], 1)
    return float(fixed), float(slope)


def comparison(cases: list[Compared], architecture: str) -> list[str]:
    """Lines of Markdown: a table, and what follows of launch cost; a line that says why there is none."""
    if not cases:
        return [f"No compiled rows of NPU {architecture} to compare with: see `python -m experiments.run +exp=npu_compile`."]
    lines = ["| case | measured µs | predicted µs | measured / predicted | not priced |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.case} | {one.measured_us:.1f} | {one.predicted_us:.1f} | {one.measured_us / one.predicted_us:.2f} | "
        f"{one.unpriced or '–'} |"
        for one in cases
    ]
    found = launch_cost(cases)
    said = (
        f"Over cases that are priced in full: measured ≈ {found[0]:.0f} µs a launch + {found[1]:.2f} × predicted."
        if found
        else "Too few cases are priced in full for a launch cost."
    )
    return [*lines, "", said]
