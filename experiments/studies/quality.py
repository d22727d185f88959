"""Every method at every retention on the same windows, dense first: perplexity, fidelity, accuracy, and which methods differ.

Cell by cell, so that it can be interrupted.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Group
from torch import Tensor

from experiments.asked import Asked
from experiments.cells import (
    Attachment,
    Cell,
    Dense,
    FullAttachment,
    attachment,
    divergence_rows,
    full_row,
    measure_cell,
    method_row,
    paired_error,
)
from experiments.comparisons import comparison_rows
from experiments.lab import Lab, MethodSettings
from experiments.progress import say
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.evaluation.intervals import bootstrap_interval
from shadowattn.evaluation.perplexity import unigram_loss
from shadowattn.evaluation.tasks import mean_change, mean_score
from shadowattn.offline import save_profile
from shadowattn.reporting import tables, verdicts
from shadowattn.reporting.figures import layer_errors, octaves
from shadowattn.reporting.figures.quality import draw as draw_quality
from shadowattn.reporting.figures.retention import draw as draw_retention
from shadowattn.reporting.flags import (
    LEAST_SCORE,
    NOT_CLAIMED,
    OVERLAPS,
    UNUSED,
    density_flag,
    difference_flags,
    flag_lines,
    quality_flag,
)
from shadowattn.reporting.rows import PlacedRow, QualityRow, Row
from shadowattn.reporting.style import ALL_KEYS
from shadowattn.types import RetentionProfile

_UNITS = {
    "perplexity": "1",
    "loss": "nat",
    "loss_increase": "nat",
    "loss_increase_error": "nat",
    "loss_increase_low": "nat",
    "loss_increase_high": "nat",
    "octave_loss_increase": "nat",
    "octave_loss_increase_error": "nat",
    "kl_divergence": "nat",
    "kl_divergence_error": "nat",
    "kl_divergence_low": "nat",
    "kl_divergence_high": "nat",
    "first_divergent_token": "tokens",
    "first_divergent_token_min": "tokens",
    "first_divergent_token_max": "tokens",
}
# Method and retention.
CellName = tuple[str, float]
Pair = tuple[CellName, CellName]


@dataclass(frozen=True)
class Quality(Study):
    """Quality against retention; each method is compared with the main one, window by window.

    Methods of `full` attend to every key: one cell each, at retention 1; the main method is compared with it at all of its own.
    `rivals`: for methods by name, another one that they are compared with beside the main one. `look`: a line under the table,
    what a reader should look at.
    """

    rivals: dict[str, str] = field(default_factory=dict)
    look: str = ""
    on_gpu: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "task", "seed", "retention", "retentions", "method", "compare", "full", "estimator"),
        *("allocator", "selection", "importance", "sensitivity", "calibration", "key_offset", "grid", "graphs", "device"),
        *("kernel", "dense_above", "decode", "pipeline", "scheduler"),
    )
    headline: ClassVar[tuple[str, ...]] = (
        "loss_increase",
        "perplexity",
        "kl_divergence",
        "accuracy",
        "rouge_l",
        "mass_recall",
        "topk_overlap",
        "output_error",
    )

    def check(self, lab: Lab) -> None:
        methods = self.methods(lab)
        for name, rival in self.rivals.items():
            if name not in methods or rival not in methods or name == rival:
                raise InputError(f"study.rivals: expected two different methods of {', '.join(methods)}, got {name}: {rival}")
            if lab.main.name in (name, rival):
                raise InputError(f"study.rivals: {name} and {rival} are compared in any case; leave the pair out")

    def diverging(self, lab: Lab) -> tuple[str, int]:
        return "evaluation.windows", lab.of("evaluation").windows

    def methods(self, lab: Lab) -> dict[str, MethodSettings]:
        """By name, the main one first."""
        return lab.methods

    def rivals_of(self, lab: Lab) -> dict[str, str]:
        """What else each method is compared with, beside the main one."""
        return self.rivals

    def pairs(self, lab: Lab, rows: Sequence[Row]) -> dict[Pair, str]:
        """The pairs of cells to compare, and what a reader should know of each; `rows` are those of all cells.

        At retention 1 every method is dense, and nothing can differ.
        """
        main, names = lab.main.name, self.methods(lab)
        sparse = [at for at in lab.retentions if at < 1]
        pairs = [((name, at), (main, at)) for at in sparse for name in names if name != main]
        pairs += [((main, at), (name, 1.0)) for at in sparse for name in lab.full]
        flags = density_flags(rows, pairs)
        return {pair: flags.get(pair, "") for pair in pairs}

    def measure(self, lab: Lab) -> list[Row]:
        rows = self._cells(lab)
        increases = {(row.method, row.retention): row for row in rows if row.metric == "loss_increase"}
        units = lab.units("cells")
        losses = {cell: units.read(cell_key(*cell))["window_losses"] for cell in increases}
        rival_pairs = [
            ((name, at), (rival, at)) for at in lab.retentions if at < 1 for name, rival in self.rivals_of(lab).items()
        ]
        pairs = dict.fromkeys(rival_pairs, "") | density_flags(rows, rival_pairs) | self.pairs(lab, rows)
        rows = rows + comparison_rows(increases, losses, list(pairs), flags=pairs)
        if lab.of("evaluation").divergence_windows:
            divergences = {cell: units.read(cell_key(*cell))["window_divergences"] for cell in increases}
            rows += comparison_rows(increases, divergences, list(pairs), flags=pairs, by="divergence")
        return rows

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        drawn = {"quality": draw_quality(rows)}
        if (rows.metric == "retention").any():
            drawn["retention"] = draw_retention(rows)
        if (rows.metric == layer_errors.METRIC).any():
            drawn["layers"] = layer_errors.draw(rows)
        if (rows.metric == octaves.METRIC).any():
            drawn["octaves"] = octaves.draw(rows)
        return drawn

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        look = [self.look] if self.look else []
        said = [*answer_flags(rows), *flag_lines(rows[rows.metric == "density"])]
        return Group(tables.summary_table(rows, title), *look, *said, *verdicts.compared(rows))

    def beside(self, lab: Lab, windows: Tensor, attached: Attachment) -> dict[str, float]:
        """Further figures of a sparse method's fidelity, on the first windows."""
        return {}

    def _cells(self, lab: Lab) -> list[Row]:
        """Rows of all cells; those finished before are not measured again. Raises `ShardDoneError` where cells are left to other
        shards."""
        units, windows = lab.units("cells"), lab.heldout()
        held_to, floor = Dense.of(lab, windows), unigram_loss(windows)
        methods = self.methods(lab)
        cells = [(name, retention) for retention in lab.retentions for name in methods]
        if not all(units.has(cell_key(*cell)) for cell in [*((name, 1.0) for name in lab.full), *cells]):
            held_to.check_room(lab)
        profiles = {cell: lab.offline.profile(methods[cell[0]].allocator, cell[1]) for cell in cells}
        for name in methods:
            say(f"retention: {name}, {_means(profiles[name, lab.retentions[0]])}")
        if any("bank" in method.needs and not method.on_device for method in methods.values()):
            _ = lab.banks.bank
        row = replace(lab.row(QualityRow), n=windows.numel() - len(windows))
        dense = Cell(**units.get("dense", lambda: asdict(measure_cell(lab, windows, None))))
        pieces = {}
        for name, full in lab.full.items():

            def measured_full(full=full) -> dict:
                attached = FullAttachment(full, lab.offline.attention_ranges(full.key_offset))
                return asdict(measure_cell(lab, windows, attached, held_to))

            pieces[cell_key(name, 1.0)] = measured_full
        for (name, retention), profile in profiles.items():
            key = cell_key(name, retention)
            save_profile(profile, lab.folder / "profiles" / f"{key}.json")

            def measured(method=methods[name], profile=profile) -> dict:
                attached = attachment(lab, method, profile)
                cell = measure_cell(lab, windows, attached, held_to)
                first = windows[: lab.of("evaluation").fidelity_windows]
                beside = self.beside(lab, first, attached) if len(first) else {}
                return asdict(replace(cell, fidelity=cell.fidelity | beside))

            pieces[key] = measured
        todo = sum(not units.has(key) for key in pieces)
        say(f"evaluate: {len(pieces)} cells and dense, {len(windows)} windows of {windows.shape[1]} tokens, {todo} cells to do")
        lab.measure_pieces(units, pieces, "cells")
        rows = _dense_rows(lab, row, dense, windows, floor)
        for name in lab.full:
            cell = Cell(**units.read(cell_key(name, 1.0)))
            rows += _loss_rows(lab, full_row(lab, row, name), cell, dense, windows, floor)
        for name, retention in cells:
            method, cell = methods[name], Cell(**units.read(cell_key(name, retention)))
            rows += _cell_rows(lab, row, method, retention, cell, dense, windows, floor)
            rows += budget_rows(replace(rows[-1], unit="1"), profiles[name, retention])
            if name == lab.main.name:
                rows += head_rows(replace(rows[-1], unit="1"), profiles[name, retention])
        uneven = density_flags(rows, [(cell, (lab.main.name, cell[1])) for cell in cells if cell[0] != lab.main.name])
        said = {cell: f"{flag} against {lab.main.name}" for (cell, _), flag in uneven.items()}
        return [replace(row, flag=said.get((row.method, row.retention), "")) if row.metric == "density" else row for row in rows]


def _cell_rows(
    lab: Lab, row: QualityRow, method: MethodSettings, retention: float, cell: Cell, dense: Cell, windows: Tensor, floor: float
) -> list[Row]:
    row = method_row(lab, row, method, retention)
    rows = _loss_rows(lab, row, cell, dense, windows, floor)
    if retention < 1 and not cell.sparse_rows:
        rows = [replace(one, flag="; ".join(filter(None, (one.flag, UNUSED)))) for one in rows]
    row = replace(row, n=windows.numel())  # attention also runs on a window's last token
    rows += [
        replace(row, metric="density", value=cell.density),
        replace(row, metric="sparse_density", value=cell.sparse_density),
        replace(row, metric="sparse_rows", value=float(cell.sparse_rows), unit="head rows"),
        *(replace(row, metric=metric, value=value) for metric, value in cell.counts.items()),
    ]
    return rows


def _loss_rows(lab: Lab, row: QualityRow, cell: Cell, dense: Cell, windows: Tensor, floor: float) -> list[Row]:
    """What is said of every method, sparse or not: loss, fidelity, accuracy."""
    method = "INT8" if row.allocator == ALL_KEYS else "sparse"
    overlaps = {metric: cell.fidelity.get(metric) for metric in OVERLAPS}
    error = paired_error(cell.window_losses, dense.window_losses)
    flag = quality_flag(
        loss=cell.loss, dense_loss=dense.loss, floor_loss=floor, windows=len(windows), increase_error=error, method=method,
        **overlaps,
    )  # fmt: skip
    predicted = windows.numel() - len(windows)
    rows = [
        replace(row, metric="perplexity", value=math.exp(cell.loss), n=predicted, flag=flag),
        replace(row, metric="loss", value=cell.loss, n=predicted, flag=flag),
        replace(row, metric="loss_increase", value=cell.loss - dense.loss, n=predicted, flag=flag),
        replace(row, metric="loss_increase_error", value=error, n=len(windows)),
    ]
    rows += _interval_rows(row, cell, dense)
    rows += _octave_rows(row, cell, dense)
    rows += divergence_rows(row, cell.window_divergences, windows.shape[1])
    observed = windows[: lab.of("evaluation").fidelity_windows]
    rows += [replace(row, metric=metric, value=value, n=observed.numel()) for metric, value in cell.fidelity.items()]
    rows += [
        replace(row, metric=layer_errors.METRIC, value=value, layer=layer, n=observed.numel())
        for layer, value in cell.layer_errors
    ]
    generated = len(observed) * lab.of("evaluation").generated_tokens
    for metric, value in cell.generation.items():  # a share of tokens; all else is one figure a prompt
        rows.append(replace(row, metric=metric, value=value, n=generated if metric == "divergent_tokens" else len(observed)))
    rows += _score_rows(lab.asked, row, cell, dense)
    return [replace(r, unit=_UNITS.get(r.metric, "1")) for r in rows]


def _octave_rows(row: QualityRow, cell: Cell, dense: Cell) -> list[Row]:
    """The loss increase of the rows that see few keys, and of those that see more, with its standard error."""
    rows = []
    for (first, losses), (_, dense_losses) in zip(cell.octave_losses, dense.octave_losses, strict=True):
        increase = float(np.mean(np.subtract(losses, dense_losses)))
        octave = replace(row, octave=first, n=len(losses))
        rows.append(replace(octave, metric=octaves.METRIC, value=increase))
        rows.append(replace(octave, metric=f"{octaves.METRIC}_error", value=paired_error(losses, dense_losses)))
    return rows


def _interval_rows(row: QualityRow, cell: Cell, dense: Cell) -> list[Row]:
    """The ends of the 95 % intervals of perplexity and loss increase, which is paired, by the bootstrap of windows."""
    if len(cell.window_losses) < 2:
        return []
    loss = bootstrap_interval(cell.window_losses)
    ends = {"perplexity_low": math.exp(loss.low), "perplexity_high": math.exp(loss.high)}
    if cell is not dense:
        increase = bootstrap_interval(np.subtract(cell.window_losses, dense.window_losses))
        ends |= {"loss_increase_low": increase.low, "loss_increase_high": increase.high}
    return [replace(row, metric=metric, value=value, n=loss.n) for metric, value in ends.items()]


def density_flags(rows: Sequence[Row], pairs: Sequence[Pair]) -> dict[Pair, str]:
    """What to say of pairs of sparse methods whose measured densities differ by more than 1 %."""
    densities = {(row.method, row.retention): row.value for row in rows if row.metric == "density"}
    flags = {
        (cell, rival): density_flag(densities[cell], densities[rival])
        for cell, rival in pairs
        if cell in densities and rival in densities
    }
    return {pair: flag for pair, flag in flags.items() if flag}


def budget_rows(row: Row, profile: RetentionProfile) -> list[Row]:
    """Mean retention over all layers and over those that are not dense: a kernel sees the second."""
    row = replace(row, n=sum(map(len, profile.retention)), flag="")
    return [
        replace(row, metric="mean_retention", value=profile.mean_retention),
        replace(row, metric="sparse_mean_retention", value=profile.sparse_mean_retention),
        replace(row, metric="dense_layers", value=float(len(profile.dense_layers))),
    ]


def head_rows(row: PlacedRow, profile: RetentionProfile) -> list[PlacedRow]:
    """The retention of every head."""
    row = replace(row, metric="retention", n=1, flag="")
    return [
        replace(row, value=value, layer=layer, head=head)
        for layer, heads in enumerate(profile.retention)
        for head, value in enumerate(heads)
    ]


def _means(profile: RetentionProfile) -> str:
    dense = ", ".join(map(str, profile.dense_layers)) or "none"
    means = f"mean {profile.mean_retention:.4g}, over sparse layers {profile.sparse_mean_retention:.4g}"
    return f"{profile.allocator}: {means}, dense layers: {dense}"


def _score_rows(asked: Asked | None, row: QualityRow, cell: Cell, dense: Cell) -> list[Row]:
    """The mean score of the task's questions and, of two or more, what a method changes; each with its 95 % interval."""
    if asked is None:
        return []
    reason = asked.unable(dense.scores, least=LEAST_SCORE)
    flags = [f"{reason}: {NOT_CLAIMED}"] if reason else []
    means = {asked.metric: (mean_score(asked.metric, cell.scores), flags)}
    if cell is not dense and len(cell.scores) > 1:
        change = mean_change(asked.metric, cell.scores, dense.scores)
        differences = difference_flags(change.value, change.low, change.high)
        means[f"{asked.metric}_change"] = change, [*flags, *differences]
    rows, row = [], asked.row(row)
    for metric, (mean, said) in means.items():
        ends = {metric: mean.value, f"{metric}_low": mean.low, f"{metric}_high": mean.high}
        rows += [replace(row, metric=name, value=value, n=mean.n, flag="; ".join(said)) for name, value in ends.items()]
    return rows


def answer_flags(rows: pd.DataFrame) -> list[str]:
    """What the flags of a quality study's rows on its task's questions say, a line each."""
    return flag_lines(rows[rows.metric.str.startswith(("accuracy", "rouge_l"))])


def _dense_rows(lab: Lab, row: QualityRow, dense: Cell, windows: Tensor, floor: float) -> list[Row]:
    flag = quality_flag(loss=dense.loss, dense_loss=dense.loss, floor_loss=floor, windows=len(windows), increase_error=0.0)
    row = replace(row, flag=flag)
    return [
        replace(row, metric="perplexity", value=math.exp(dense.loss)),
        replace(row, metric="loss", value=dense.loss, unit="nat"),
        replace(row, metric="unigram_loss", value=floor, unit="nat", n=windows.numel()),
        *_interval_rows(replace(row, flag=""), dense, dense),
        *_score_rows(lab.asked, replace(row, flag=""), dense, dense),
    ]


def cell_key(name: str, retention: float) -> str:
    """What the file of a cell is called."""
    return f"{name}@{retention:.15g}"
