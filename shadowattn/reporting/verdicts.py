"""Sentences that rows decide."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

# Allocators that tell heads apart by what was measured on the model, and those that do not.
HEAD_SPECIFIC = ("paper", "artifact", "waterfill", "error_greedy")
RIVALS = ("first_layers_dense", "uniform")

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


def head_budgets(rows: pd.DataFrame) -> str:
    """Whether head-specific budgets pay beyond dense first layers and beyond uniform ones, by the loss they gain.

    Better and worse mean: by more than two standard errors of the gain, paired window by window.
    """
    allocators = rows.drop_duplicates("method").set_index("method").allocator
    rivals = [method for method, allocator in allocators.items() if allocator in RIVALS]
    lines = ["Do head-specific budgets pay? Retentions at which a method's loss is better, or worse, than a rival's:"]
    lines += [
        f"  {method} {_compared(rows, method, rival)}"
        for method in allocators.index[allocators.isin(HEAD_SPECIFIC)]
        for rival in rivals
    ]
    return "\n".join(lines)


def _compared(rows: pd.DataFrame, method: str, rival: str) -> str:
    own = rows[rows.method == method]
    gain, error = (_by_retention(own, f"gain_over_{rival}{end}") for end in ("", "_error"))
    better, worse = (gain > 2 * error).sum(), (gain < -2 * error).sum()
    each = ", ".join(f"{at:g}: {value:+.4f} ± {error[at]:.4f}" for at, value in gain.items())
    return f"against {rival}: better at {better}, worse at {worse} of {len(gain)} (gain in nat at {each})"


def _by_retention(rows: pd.DataFrame, metric: str) -> pd.Series:
    return rows[rows.metric == metric].set_index("retention").value.sort_index()
