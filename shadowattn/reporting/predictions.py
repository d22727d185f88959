"""How far simulated calls are from measured ones: what a row of errors decides."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

# How far off a simulated call may be.
PREDICTION_TARGET = 0.10


@dataclass(frozen=True)
class PredictionError:
    """Relative errors of simulated calls over `chunks` held-out chunks: their mean, its 95 % interval over passes, the worst."""

    mode: str
    by: str
    mean: float
    low: float
    high: float
    worst: float
    within: int
    chunks: int

    @property
    def verdict(self) -> str:
        """`held` where the whole interval of the mean error lies within the target, `missed` where all of it lies beyond."""
        if self.low >= -PREDICTION_TARGET and self.high <= PREDICTION_TARGET:
            return "held"
        return "missed" if self.low > PREDICTION_TARGET or self.high < -PREDICTION_TARGET else "undecided"

    def cells(self) -> tuple[str, ...]:
        """Mode, source of costs, mean error with interval, worst, chunks within the target, verdict."""
        interval = f"{self.mean:+.1%} ({self.low:+.1%} … {self.high:+.1%})"
        return self.mode, self.by, interval, f"{self.worst:+.1%}", f"{self.within} of {self.chunks}", self.verdict


def prediction_errors(rows: pd.DataFrame) -> list[PredictionError]:
    """By mode and source of costs, over the chunks that nothing was fitted on; intervals by Student's t over passes."""
    errors, turns = (rows[(rows.flag == "") & (rows.metric == metric)] for metric in ("error", "turn_error"))
    predictions = []
    for (mode, by), chunk_errors in errors.groupby(["mode", "by"], sort=False):
        chunks = chunk_errors.value.to_numpy()
        passes = turns[(turns["mode"] == mode) & (turns.by == by)].value.to_numpy()
        half = stats.t.ppf(0.975, len(passes) - 1) * passes.std(ddof=1) / len(passes) ** 0.5
        mean, worst = float(passes.mean()), float(chunks[np.abs(chunks).argmax()])
        within = int((np.abs(chunks) <= PREDICTION_TARGET).sum())
        predictions.append(PredictionError(mode, by, mean, float(mean - half), float(mean + half), worst, within, len(chunks)))
    return predictions
