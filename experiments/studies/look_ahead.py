"""The estimate of a layer made from what entered an earlier one: what it loses, layer by layer."""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import ClassVar

import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from experiments.lab import Lab
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.evaluation.look_ahead import measure_look_ahead
from shadowattn.models.decoder import read_decoder
from shadowattn.reporting.figures.look_ahead import draw as draw_look_ahead
from shadowattn.reporting.rows import PlacedRow


@dataclass(frozen=True)
class LookAheadRow(PlacedRow):
    """A row about an estimate made `ahead` layers early, of one head; `n` counts rows of queries."""

    ahead: int = 0


@dataclass(frozen=True)
class LookAheadStudy(Study):
    """Recall and attention mass of lists ranked 1, 2, … layers early (`ahead`), of the last `rows` rows of every held-out window.

    Scores are exact products in float32: what is lost is lost by looking ahead alone.
    """

    ahead: list[int] = field(default_factory=lambda: [1, 2, 4])
    rows: int = 128
    needs: ClassVar[tuple[str, ...]] = ("model", "data", "evaluation", "seed", "retention", "retentions")
    headline: ClassVar[tuple[str, ...]] = ("recall", "mass")

    def __post_init__(self):
        check_count("study.rows", self.rows)
        if not self.ahead or min(self.ahead) < 1:
            raise InputError(f"study.ahead: expected numbers of layers, at least 1 each, got {self.ahead or 'none'}")

    def check(self, lab: Lab) -> None:
        read_decoder(lab.loaded.model)
        if max(self.ahead) >= lab.shape.layers:
            raise InputError(f"study.ahead: expected less than the model's {lab.shape.layers} layers, got {max(self.ahead)}")
        if self.rows > lab.context_tokens:
            raise InputError(f"study.rows: expected at most the {lab.context_tokens} tokens of a window, got {self.rows}")

    def measure(self, lab: Lab) -> list[LookAheadRow]:
        """Window by window; those finished before are not measured again."""
        windows, units = lab.heldout(), lab.units("windows")
        say(f"look-ahead: {lab.shape.layers} layers, the last {self.rows} rows of {len(windows)} windows")
        found = [
            units.get(str(index), partial(self._window, lab, window))
            for index, window in enumerate(bar(windows, "look ahead", total=len(windows)))
        ]
        rows = []
        row = replace(lab.row(LookAheadRow), method="exact", estimator="oracle", allocator="uniform", n=len(windows) * self.rows)
        for metric in ("recall", "mass"):
            for key in found[0][metric]:
                ahead, at = key.split("@")
                means = torch.tensor([one[metric][key] for one in found], dtype=torch.float64).mean(0)
                cell = replace(row, metric=metric, retention=float(at), ahead=int(ahead))
                rows += [
                    replace(cell, value=value, layer=layer, head=head)
                    for layer, heads in enumerate(means.tolist())
                    for head, value in enumerate(heads)
                    if value == value  # the first layers have none so far before
                ]
        return rows

    def _window(self, lab: Lab, window: Tensor) -> dict[str, dict[str, list]]:
        decoder = read_decoder(lab.loaded.model)
        found = measure_look_ahead(decoder, window, rows=self.rows, retentions=lab.retentions, ahead=self.ahead)
        return {
            metric: {f"{ahead}@{at:.15g}": values for (ahead, at), values in table.items()}
            for metric, table in asdict(found).items()
        }

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"look_ahead": draw_look_ahead(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """A line for each distance: means over heads and the worst head."""
        retentions = sorted(rows.retention.unique())
        heads = [f"{metric} at {at:g}" for metric in ("recall", "mass") for at in retentions]
        table = Table("layers ahead", *heads, title=f"{title} · mean over heads (worst head)", title_justify="left")
        cells = rows.groupby(["ahead", "metric", "retention"]).value.agg(["mean", "min"])
        for ahead in sorted(rows.ahead.unique()):
            of = [cells.loc[ahead, metric, at] for metric in ("recall", "mass") for at in retentions]
            table.add_row(str(ahead), *(f"{one['mean']:.3f} ({one['min']:.2f})" for one in of))
        return table
