"""Times measured on an NPU beside what its compiler's cost model predicted, and the launch cost that follows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from shadowattn.online.simulation.npu import Line


@dataclass(frozen=True)
class Compared:
    """One case: measured and predicted microseconds; `unpriced` names what the prediction leaves out."""

    case: str
    measured_us: float
    predicted_us: float
    unpriced: str


def case_name(part: str, model: str, method: str, *, heads: int, group: int, rows: int, keys: int, head_dim: int) -> str:
    """One name of a compiled graph for its prediction and its measurement; forms have that of `device_check.CASES`."""
    if part == "form":
        return method
    of = "" if model == "none" else f" of {model}"
    folded = f" in groups of {group}" if group > 1 else ""
    return f"{part}{of}: {method}, {heads} heads{folded} × {rows} × {keys}, D {head_dim}"


def compared(median_ms: Mapping[str, float], compiled: pd.DataFrame, architecture: str) -> list[Compared]:
    """The cases that ran and that were compiled for `architecture`, such as 4000; rows of `+exp=npu_compile`.

    Only rows in which the compiler chose the number of tiles itself. Without a device it may choose fewer than beside one: 4 of 6
    on NPU 4000.
    """
    rows = compiled[(compiled.platform == architecture.removeprefix("NPU")) & compiled.value.notna() & (compiled.tiles == 0)]
    predicted = {
        case_name(
            row.part, row.model, row.method, heads=row.heads, group=row.group, rows=row.chunk_rows, keys=row.context_tokens,
            head_dim=row.head_dim,
        ): row
        for row in rows.itertuples()
    }  # fmt: skip
    return [
        Compared(case, 1e3 * ms, float(predicted[case].value), str(predicted[case].unpriced))
        for case, ms in median_ms.items()
        if ms == ms and case in predicted
    ]


@dataclass(frozen=True)
class LaunchCost:
    """A line through measured over predicted microseconds: `fixed_us` + `slope` × predicted, by least squares of relative errors
    through `n` cases; neither part is negative.

    `worst`: the largest distance of a case from it, as a share of what was measured.
    """

    fixed_us: float
    slope: float
    worst: float
    n: int


def launch_cost(cases: list[Compared]) -> LaunchCost | str:
    """The line through the cases without unpriced parts; or why there is none: too few, or faster where predicted slower."""
    priced = [one for one in cases if not one.unpriced]
    predicted, measured = (np.array([getattr(one, name) for one in priced]) for name in ("predicted_us", "measured_us"))
    if len(priced) < 3 or np.ptp(predicted) == 0:
        return f"Too few different cases are priced in full for a launch cost: {len(priced)}, at least 3 are needed."
    if np.corrcoef(predicted, measured)[0, 1] <= 0:
        return "No launch cost: cases that are predicted to take longer took less time, so that the predictions do not hold here."
    line = Line.through(predicted, measured)
    slope, fixed = 1e-3 * line.ns, line.fixed_us
    worst = float(np.abs((fixed + slope * predicted) / measured - 1).max())
    return LaunchCost(fixed, slope, worst, len(priced))


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
    if isinstance(found, LaunchCost):
        found = (
            f"Over the {found.n} cases that are priced in full: measured ≈ {found.fixed_us:.0f} µs a launch + "
            f"{found.slope:.2f} × predicted; the case farthest from this line is {found.worst:.0%} off it."
        )
    return [*lines, "", found]
