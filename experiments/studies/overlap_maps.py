"""How much of a list could be reused: by a later layer, by a later row of the same head."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.evaluation.recall import top_keys
from shadowattn.online.chunk import Chunk
from shadowattn.reporting.figures.overlap_maps import draw as draw_overlap_maps
from shadowattn.reporting.rows import PlacedRow


@dataclass(frozen=True)
class OverlapRow(PlacedRow):
    """A row about the list of one layer or row that another would reuse: `source_layer`, and `distance`, in rows; −1 and 0 where
    it is about neither. `position` and `source_position` are those of two rows of the whole context, −1 in other rows. `n` counts
    pairs of lists."""

    source_layer: int = -1
    distance: int = 0
    position: int = -1
    source_position: int = -1


@dataclass(frozen=True)
class OverlapMaps(Study):
    """The last `rows` rows of every held-out window in a dense prefill, lists by exact scores at the run's retention.

    Layers: every layer has one list a row, the top-k of the attention probabilities summed over its heads. `layer_overlap` is the
    share of a layer's list that is in the source layer's; `layer_mass`, the attention mass that the layer's heads have on the
    source layer's list, mean over heads.
    Rows: every head has a list of its own for each row. `row_reuse` is the share of a row's list that is in the list of the row
    `distance` rows before, or is a key after that row, which every list that is reused would have to take in.
    Row by row: `row_overlap` is the same share for `map_rows` rows spread evenly over the window, of each with each before it,
    mean over layers and heads.
    """

    rows: int = 64
    map_rows: int = 32
    needs: ClassVar[tuple[str, ...]] = ("model", "data", "evaluation", "seed", "retention")
    headline: ClassVar[tuple[str, ...]] = ("layer_overlap", "layer_mass", "row_reuse")

    def __post_init__(self):
        check_count("study.rows", self.rows, least=2)
        check_count("study.map_rows", self.map_rows, least=2)

    def check(self, lab: Lab) -> None:
        if lab.context_tokens % self.rows:
            raise InputError(
                f"study.rows: expected a divisor of the {lab.context_tokens} tokens of a window, got {self.rows}; set study.rows "
                "or evaluation.context_tokens"
            )
        if lab.context_tokens < self.map_rows:
            raise InputError(
                f"study.map_rows: expected at most the {lab.context_tokens} tokens of a window, got {self.map_rows}; set "
                "study.map_rows or evaluation.context_tokens"
            )

    def measure(self, lab: Lab) -> list[OverlapRow]:
        """Window by window; those finished before are not measured again."""
        windows, units, (retention,) = lab.heldout(), lab.units("windows"), lab.retentions
        say(f"overlap: {lab.shape.layers} layers, the last {self.rows} rows of {len(windows)} windows")
        found = [
            units.get(str(index), partial(self._overlaps, lab, window, retention))
            for index, window in enumerate(bar(windows, "overlap", total=len(windows)))
        ]
        means = {name: torch.tensor([one[name] for one in found], dtype=torch.float64).mean(0) for name in found[0]}
        row = replace(lab.row(OverlapRow), method="exact", estimator="oracle", allocator="uniform", retention=retention)
        at = _spread(self.map_rows, lab.context_tokens).tolist()
        return list(self._rows(row, means, at, windows=len(windows), heads=lab.shape.heads))

    def _overlaps(self, lab: Lab, window: Tensor, retention: float) -> dict[str, list]:
        probabilities, reuse = [], []
        spread = _spread(self.map_rows, len(window))
        queries: dict[int, list[Tensor]] = {}
        maps = []

        def observe(chunk: Chunk) -> None:
            picked = spread[(spread >= chunk.first_position) & (spread < chunk.keys)] - chunk.first_position
            queries.setdefault(chunk.layer, []).append(chunk.q[:, picked].float())
            if chunk.keys < len(window):
                return
            rows = torch.cat(queries.pop(chunk.layer), 1) @ chunk.k.float()[chunk.heads.kv].mT * chunk.scale
            maps.append(row_overlaps(top_keys(rows, spread, retention), spread).mean(0))
            logits = chunk.q.float() @ chunk.k.float()[chunk.heads.kv].mT * chunk.scale
            later = torch.arange(chunk.keys) > chunk.positions[:, None]
            probabilities.append(torch.softmax(logits.masked_fill(later, -torch.inf), -1))
            reuse.append(row_reuse(top_keys(logits, chunk.positions, retention), chunk.positions).mean(0).tolist())

        observe_prefill(lab.loaded.model, window[None], observe, chunk_tokens=self.rows)
        positions = torch.arange(len(window) - self.rows, len(window))
        overlap, mass = layer_overlaps(probabilities, positions, retention)
        between = torch.stack(maps).mean(0)
        return {
            "layer_overlap": overlap.tolist(), "layer_mass": mass.tolist(), "row_reuse": reuse, "row_overlap": between.tolist()
        }  # fmt: skip

    def _rows(
        self, row: OverlapRow, means: dict[str, Tensor], at: list[int], *, windows: int, heads: int
    ) -> Iterator[OverlapRow]:
        layers = len(means["row_reuse"])
        for metric, per_pair in (("layer_overlap", 1), ("layer_mass", heads)):
            for layer in range(layers):
                for source in range(layer + 1):
                    value = float(means[metric][layer, source])
                    n = windows * self.rows * per_pair
                    yield replace(row, metric=metric, value=value, layer=layer, source_layer=source, n=n)
        for layer in range(layers):
            for distance, value in enumerate(means["row_reuse"][layer].tolist(), 1):
                n = windows * heads * (self.rows - distance)
                yield replace(row, metric="row_reuse", value=value, layer=layer, distance=distance, n=n)
        for later, position in enumerate(at):
            for earlier, source in enumerate(at[: later + 1]):
                value, n = float(means["row_overlap"][later, earlier]), windows * heads * layers
                places = {"position": position, "source_position": source, "distance": position - source}
                yield replace(row, metric="row_overlap", value=value, n=n, **places)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"overlap_maps": draw_overlap_maps(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """Reuse by how far the source is: layers before, rows before."""
        table = Table("distance", "a layer's list found", "attention mass found", "a row's list found", title=title)
        pairs = rows[rows.source_layer >= 0].assign(apart=lambda x: x.layer - x.source_layer)
        layers = pairs.groupby(["metric", "apart"]).value.mean()
        by_distance = rows[rows.metric == "row_reuse"].groupby("distance").value.mean()
        for distance in [0, *(2**power for power in range(10))]:
            cells = [layers.get((metric, distance)) for metric in ("layer_overlap", "layer_mass")] + [by_distance.get(distance)]
            if any(cell is not None for cell in cells):
                table.add_row(str(distance), *("" if cell is None else f"{cell:.1%}" for cell in cells))
        return table


def layer_overlaps(probabilities: list[Tensor], positions: Tensor, retention: float) -> tuple[Tensor, Tensor]:
    """Overlap and mass float64 [L, L] of a layer (first axis) with the list of another, from every layer's [H, Q, K]."""
    kept = [top_keys(layer.double().sum(0), positions, retention) for layer in probabilities]
    overlap = [[float(((one & other).sum(-1) / one.sum(-1)).mean()) for other in kept] for one in kept]
    mass = [[float((layer * other).sum(-1).mean()) for other in kept] for layer in probabilities]
    return torch.tensor(overlap, dtype=torch.float64), torch.tensor(mass, dtype=torch.float64)


def row_overlaps(kept: Tensor, positions: Tensor) -> Tensor:
    """float64 [H, R, R]: what of a row's keys [H, R, K] (first axis) each other row keeps, or could not see."""
    sources = (kept | (torch.arange(kept.shape[-1]) > positions[:, None])).double()
    found = kept.double() @ sources.mT
    return found / kept.sum(-1, keepdim=True)


def _spread(rows: int, tokens: int) -> Tensor:
    """Positions of rows, int64, evenly over a window, its last one among them."""
    return ((torch.arange(rows) + 1) * tokens // rows) - 1


def row_reuse(kept: Tensor, positions: Tensor) -> Tensor:
    """float64 [H, Q − 1]: what of a row's keys [H, Q, K] the row 1, 2, … rows before keeps, or could not see; mean over rows."""
    after = torch.arange(kept.shape[-1]) > positions[:, None]
    shares = []
    for distance in range(1, kept.shape[1]):
        row, source = kept[:, distance:], kept[:, :-distance] | after[:-distance]
        shares.append(((row & source).sum(-1) / row.sum(-1)).double().mean(-1))
    return torch.stack(shares, -1)
