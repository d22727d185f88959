"""How far simulated calls are from measured ones: what a row of errors decides."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

# How far off a simulated call may be.
PREDICTION_TARGET = 0.10


@dataclass(frozen=True)
class PredictionError:
    """Relative errors of simulated calls over `chunks` held-out chunks: their mean with its 95 % interval, and the worst."""

    mode: str
    by: str
    mean: float
    low: float
    high: float
    worst: float
    within: int
    chunks: int

    @property
    def held(self) -> bool:
        """Whether the whole interval of the mean error lies within the target."""
        return max(abs(self.low), abs(self.high)) <= PREDICTION_TARGET

    def cells(self) -> tuple[str, ...]:
        """Mode, source of costs, mean error with interval, worst, chunks within the target, verdict."""
        interval = f"{self.mean:+.1%} ({self.low:+.1%} … {self.high:+.1%})"
        within = f"{self.within} of {self.chunks}"
        return self.mode, self.by, interval, f"{self.worst:+.1%}", within, "held" if self.held else "missed"


def prediction_errors(rows: pd.DataFrame) -> list[PredictionError]:
    """By mode and source of costs, over the chunks that nothing was fitted on; intervals by Student's t over chunks."""
    errors = rows[(rows.metric == "error") & (rows.flag == "")]
    made = []
    for (mode, by), of in errors.groupby(["mode", "by"], sort=False):
        values = of.value.to_numpy()
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
        mean, worst = float(values.mean()), float(values[np.abs(values).argmax()])
        within = int((np.abs(values) <= PREDICTION_TARGET).sum())
        made.append(PredictionError(mode, by, mean, float(mean - half), float(mean + half), worst, within, len(values)))
    return made
