"""How far simulated calls are from measured ones: what a row of errors decides."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

# How far off a simulated call may be.
PREDICTION_TARGET = 0.10


@dataclass(frozen=True)
class PredictionError:
    """Relative errors of simulated calls over `chunks` held-out chunks: their mean with its 95 % interval, and the worst.

    `uncertainty`: half the 95 % interval of a chunk's measured time, relative to it; the median over chunks.
    """

    mode: str
    by: str
    mean: float
    low: float
    high: float
    worst: float
    within: int
    chunks: int
    uncertainty: float

    @property
    def verdict(self) -> str:
        """`held` where the whole interval of the mean error lies within the target, else `missed`; `undecided` where the measured
        times themselves are not known to within it."""
        if self.uncertainty > PREDICTION_TARGET:
            return "undecided"
        return "held" if max(abs(self.low), abs(self.high)) <= PREDICTION_TARGET else "missed"

    def cells(self) -> tuple[str, ...]:
        """Mode, source of costs, mean error with interval, worst, chunks within the target, measured times' own ±, verdict."""
        interval = f"{self.mean:+.1%} ({self.low:+.1%} … {self.high:+.1%})"
        within = f"{self.within} of {self.chunks}"
        return self.mode, self.by, interval, f"{self.worst:+.1%}", within, f"± {self.uncertainty:.1%}", self.verdict


def prediction_errors(rows: pd.DataFrame) -> list[PredictionError]:
    """By mode and source of costs, over the chunks that nothing was fitted on; intervals by Student's t over chunks."""
    heldout = rows[rows.flag == ""]
    errors, itself = heldout[heldout.metric == "error"], heldout[heldout.metric == "uncertainty"]
    made = []
    for (mode, by), of in errors.groupby(["mode", "by"], sort=False):
        values = of.value.to_numpy()
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
        mean, worst = float(values.mean()), float(values[np.abs(values).argmax()])
        within = int((np.abs(values) <= PREDICTION_TARGET).sum())
        measured = float(itself[itself["mode"] == mode].value.median())
        made.append(PredictionError(mode, by, mean, float(mean - half), float(mean + half), worst, within, len(values), measured))
    return made
