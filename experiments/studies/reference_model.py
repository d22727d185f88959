"""The targets of the reference model, measured: what a model must do before a study of sparse attention on it means anything.

Every figure comes with its 95 % interval over rows, windows or documents, and meets its target where all of the interval does.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from experiments.cells import Attachment, measure_cell
from experiments.lab import Lab
from experiments.offline import UNIFORM
from experiments.progress import say
from experiments.reference_model.abilities import Checks, Samples, heldout_loss_by_position, measure_checks
from experiments.reference_model.targets import TARGETS
from experiments.studies.base import Study
from experiments.studies.offline import ablation_rows
from shadowattn.evaluation.intervals import Interval, mean_interval, resampled_largest_to_median
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.random import Random
from shadowattn.reporting.figures.importance import draw as draw_importance
from shadowattn.reporting.figures.loss_by_position import draw as draw_loss_by_position
from shadowattn.reporting.rows import PlacedRow
from shadowattn.types import AblationLosses


@dataclass(frozen=True)
class ReferenceModel(Study):
    """Copying, context, retrieval, and the loss with random keys at `random_retention` and exact ones at `oracle_retention`.

    `resamples`: of the windows, for the interval of the largest importance over the median.
    """

    samples: Samples = field(default_factory=Samples)
    random_retention: float = 0.05
    oracle_retention: float = 0.2
    resamples: int = 2000
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "retention", "allocator", "importance", "calibration", "key_offset"),
        *("grid", "graphs", "kernel", "dense_above"),
    )
    headline: ClassVar[tuple[str, ...]] = (
        "copy_gain",
        "context_gain",
        "key_value_accuracy",
        "needle_accuracy",
        "importance_ratio",
    )

    def measure(self, lab: Lab) -> list[PlacedRow]:
        """For each target its figure and the ends of its interval (rows `NAME`, `NAME_low`, `NAME_high`); `n` counts what was
        averaged. Then the loss at every position of held-out windows as rows `loss_at_N`.
        """
        model, tokenizer, heldout = lab.loaded.model, lab.loaded.tokenizer, lab.corpus.heldout
        units, samples = lab.units("checks"), self.samples
        say("checks: copying, context and retrieval with dense attention, then random and exact keys")
        checks = Checks(**units.get("dense_checks", lambda: asdict(measure_checks(model, tokenizer, heldout, samples))))
        positions = units.get("positions", lambda: heldout_loss_by_position(model, tokenizer, heldout, samples).tolist())
        windows = lab.heldout()
        dense = units.get("dense", lambda: measure_cell(lab, windows, None).window_losses)

        def increase(name: str, estimator, retention: float) -> Interval:
            attachment = Attachment(lab.offline.profile(UNIFORM, retention), estimator)
            sparse = units.get(name, lambda: measure_cell(lab, windows, attachment).window_losses)
            return mean_interval(np.subtract(sparse, dense))

        measured = {
            "copy_gain": checks.copy_gain,
            "context_gain": checks.context_gain,
            "key_value_accuracy": checks.key_value_accuracy,
            "needle_accuracy": checks.needle_accuracy,
            "random_loss_increase": increase("random", Random(lab.seed), self.random_retention),
            "oracle_loss_increase": increase("oracle", Oracle(), self.oracle_retention),
            "importance_ratio": resampled_largest_to_median(
                _head_increases(lab.offline.losses), resamples=self.resamples, seed=lab.seed
            ),
        }
        row = replace(lab.row(PlacedRow), n=windows.numel() - len(windows))
        rows = [line for name, interval in measured.items() for line in _interval_rows(row, name, interval)]
        n = checks.context_gain.n
        rows += ablation_rows(row, lab.offline.importance)
        return rows + [replace(row, metric=f"loss_at_{at}", value=loss, unit="nat", n=n) for at, loss in enumerate(positions)]

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        """Loss by position, and head importance."""
        drawn = {"loss_by_position": draw_loss_by_position(rows)}
        return drawn | ({"importance": draw_importance(rows)} if "layer" in rows else {})

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """Measured beside target."""
        printed = Table(title=title, title_justify="left")
        for heading in ("check", "measured", "95 % interval", "n", "target", "unit", ""):
            printed.add_column(heading)
        for name, measured in measured_intervals(rows).items():
            target = TARGETS[name]
            ends = f"{measured.low:.3f} to {measured.high:.3f}"
            least = f"{'≤' if target.at_most else '≥'} {target.value:g}"
            cells = (target.meaning, f"{measured.value:.3f}", ends, str(measured.n), least, target.unit, target.verdict(measured))
            printed.add_row(*cells)
        return printed


def measured_intervals(rows: pd.DataFrame) -> dict[str, Interval]:
    """The interval of each target's figure, from its three rows."""
    at = rows.set_index("metric")
    return {
        name: Interval(at.value[name], at.value[f"{name}_low"], at.value[f"{name}_high"], int(at.n[name])) for name in TARGETS
    }


def _interval_rows(row: PlacedRow, name: str, measured: Interval) -> list[PlacedRow]:
    verdict = TARGETS[name].verdict(measured)
    row = replace(row, unit=TARGETS[name].unit, n=measured.n, flag="" if verdict == "met" else f"target {verdict}")
    values = {name: measured.value, f"{name}_low": measured.low, f"{name}_high": measured.high}
    return [replace(row, metric=metric, value=value) for metric, value in values.items()]


def _head_increases(losses: AblationLosses) -> np.ndarray:
    """Loss increase without each head [H of all layers, W], on the windows that all of them were measured on."""
    heads = [head for layer in losses.heads for head in layer]
    count = min(map(len, heads))
    return np.array([head[:count] for head in heads]) - np.array(losses.base[:count])
