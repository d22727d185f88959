"""The quality of the estimate: recall of the exact top-k by every way to quantise, and what that does to the model."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from torch import Tensor

from experiments.banks import OUTPUTS
from experiments.cells import Attachment, Cell, Dense, FullAttachment, divergence_rows, full_row, measure_cell, paired_error
from experiments.comparisons import comparison_rows
from experiments.lab import Lab
from experiments.offline import UNIFORM
from experiments.progress import bar, say
from experiments.refusals import check_choice, check_count
from experiments.studies.base import Study
from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.evaluation.recall import GRANULARITIES, measure_recall, measured_rows
from shadowattn.evaluation.recall import Recall as Found
from shadowattn.graphs import GraphBank, GraphForm
from shadowattn.graphs.buckets import DISTANCES
from shadowattn.graphs.estimation import inputs_for
from shadowattn.offline.grids.mean import Mean
from shadowattn.offline.scales import scale_grid
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.nncf import NNCF
from shadowattn.online.estimators.quantised import Quantised
from shadowattn.online.full_int8 import FullInt8
from shadowattn.reporting import verdicts
from shadowattn.reporting.figures.fig14 import draw as draw_fig14
from shadowattn.reporting.figures.recall import draw as draw_recall
from shadowattn.reporting.paper import TABLE_4, TABLE_4_RETENTIONS
from shadowattn.reporting.rows import PlacedRow
from shadowattn.reporting.style import attending_to_all
from shadowattn.types import KEY_OFFSETS, ScaleGrid


@dataclass(frozen=True)
class Estimate:
    """One way to estimate.

    `dynamic`: scales of the tensors themselves, else a grid of mean × σ^±steps, see `types.ScaleGrid`. `output` float,
    target_requant or fixed_output. `key_offset`: none, mean or midrange, null for the run's; what is taken off K before it is
    quantised. It leaves out a constant of each row, so that the `pooled` granularity and the score correlation, which compare
    scores of different rows, fall for that reason alone. `nncf`: the graph that NNCF makes, whatever else is set; it knows no
    offset. `quality`: measure the loss of the whole model with it, too.
    """

    dynamic: bool = False
    sigma: float = 0.5
    steps: int = 1
    pattern: str = "product"
    lookup: str = "raw"
    bits: int = 8
    smooth: bool = False
    output: str = "float"
    key_offset: str | None = None
    nncf: bool = False
    quality: bool = False

    def check(self, key: str) -> None:
        """Raises `InputError`, which names the setting by `key`, on what makes no sense."""
        check_choice(f"{key}.output", self.output, OUTPUTS)
        check_choice(f"{key}.lookup", self.lookup, DISTANCES)
        check_choice(f"{key}.key_offset", self.key_offset, (None, *KEY_OFFSETS))
        if self.nncf and self.key_offset not in (None, "none"):
            raise InputError(f"{key}.key_offset: NNCF's graph takes keys as they are, got {self.key_offset}; leave it out")
        self.grid_parts()
        Quantised(bits=self.bits, smooth=self.smooth)
        if self.output != "float" and (self.dynamic or self.smooth or self.bits != 8):
            raise InputError(f"{key}.output: {self.output} needs 8 bits, a grid and no smoothing")

    def grid_parts(self) -> Mean:
        """What makes a grid of observed scales."""
        return Mean(self.sigma, self.steps, self.pattern)

    def offset_kind(self, lab: Lab) -> str:
        """Its own `key_offset`, or the run's; none of NNCF's."""
        return "none" if self.nncf else self.key_offset or lab.of("key_offset")

    def grid(self, lab: Lab) -> ScaleGrid:
        """The static scales, of keys less its offset."""
        return scale_grid(lab.offline.observations_by(self.offset_kind(lab)), self.grid_parts())


@dataclass(frozen=True)
class RecallRow(PlacedRow):
    """A row about an estimate: how many buckets it has (0: none), their σ and lookup, and `granularity` row or pooled.

    `key_offset`: none, mean or midrange; empty in rows from before there were any.
    `sampled` rows of every `chunk` are ranked, evenly spread over it; 0 where the row is about no ranking. `n` counts them.
    """

    buckets: int = 0
    sigma: float = math.nan
    lookup: str = ""
    granularity: str = ""
    key_offset: str = ""
    sampled: int = 0
    chunk: int = 0


@dataclass(frozen=True)
class Recall(Study):
    """Recall of every one of `estimates` at `retentions`, one after the other.

    The loss of estimates with `quality` is measured on `quality_windows` windows, and compared with that of `reference`, one of
    them; null: the first. So is the divergence from dense attention, on the first `evaluation.divergence_windows` of these; null:
    not measured. Beside them stand the methods of `full`, which attend to every key and rank none. NNCF is calibrated on
    `nncf_samples` samples; 0 leaves it out. `sampled_rows` of each chunk are ranked.
    """

    estimates: dict[str, Estimate] = field(default_factory=dict)
    retentions: list[float] = field(default_factory=lambda: [0.2, 0.3, 0.4, 0.5, 0.8])
    reference: str | None = None
    quality_windows: int = 16
    nncf_samples: int = 64
    sampled_rows: int = 32
    on_gpu: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "retention", "calibration", "key_offset", "grid", "graphs", "device"),
        *("kernel", "dense_above", "full"),
    )
    headline: ClassVar[tuple[str, ...]] = ("recall", "loss_increase")

    def __post_init__(self):
        if not self.estimates:
            raise InputError("study.estimates: expected at least one way to estimate, got none; see conf/exp/table4.yaml")
        if not self.retentions or not all(0 < retention <= 1 for retention in self.retentions):
            raise InputError(f"study.retentions: expected at least one, above 0 and at most 1, got {self.retentions}")
        for name, estimate in self.estimates.items():
            estimate.check(f"study.estimates.{name}")
        if self.reference is not None and self.reference not in self._chosen:
            known = ", ".join(self._chosen) or "there are none"
            raise InputError(
                f"study.reference: expected one of the estimates with quality=true ({known}), got {self.reference!r}"
            )
        check_count("study.quality_windows", self.quality_windows)
        check_count("study.nncf_samples", self.nncf_samples, least=0)
        check_count("study.sampled_rows", self.sampled_rows)

    def check(self, lab: Lab) -> None:
        evaluation = lab.of("evaluation")
        if evaluation.divergence_windows and not self._chosen:
            raise InputError(
                f"evaluation.divergence_windows: got {evaluation.divergence_windows}, and no estimate is put into the model; set "
                "quality=true of one of study.estimates"
            )
        if evaluation.generated_tokens:
            raise InputError(
                f"evaluation.generated_tokens: {lab.of('experiment')} generates nothing, got {evaluation.generated_tokens}; "
                "leave it out"
            )
        if both := sorted(set(self._estimates) & set(lab.full)):
            raise InputError(f"full.{both[0]}: study.estimates has the same name; call one of them otherwise")
        for name, estimate in self._estimates.items():
            if estimate.nncf and lab.gpu:
                raise InputError(
                    f"study.estimates: {name!r} runs OpenVINO's graphs on the CPU's memory, got a model on {lab.place}; leave "
                    "NNCF out with study.nncf_samples=0, or use model.device=cpu"
                )

    def measure(self, lab: Lab) -> list[RecallRow]:
        """Rows of every estimate. Recall of all is measured in one pass; what was finished before is not measured again."""
        units, windows = lab.units("recall"), lab.heldout()
        held_to = self._held_to(lab)  # first, since it may be refused
        say(f"recall: {len(self._estimates)} ways to estimate, {len(windows)} windows of {windows.shape[1]} tokens")
        if missing := {name: one for name, one in self._estimates.items() if not units.has(name)}:
            for name, found in self._recall(lab, missing, windows).items():
                units.put(name, asdict(found))
        rows = []
        for name, estimate in self._estimates.items():
            rows += self._rows(lab, name, estimate, Found(**units.read(name)))
        return rows + self._quality_rows(lab, lab.units("quality"), held_to)

    def diverging(self, lab: Lab) -> tuple[str, int]:
        return "study.quality_windows", self.quality_windows

    def _held_to(self, lab: Lab) -> Dense | None:
        """What the divergence is measured from, if it is asked for. Raises `InputError` where a cell is missing and the disk has
        no room for it."""
        if not lab.of("evaluation").divergence_windows:
            return None
        held_to, units = Dense.of(lab, lab.heldout(windows=self.quality_windows)), lab.units("quality")
        if not all(units.has(key) for key in [*map(_unit, self._chosen), *lab.full]):
            held_to.check_room(lab)
        return held_to

    @property
    def _estimates(self) -> dict[str, Estimate]:
        """Those that are measured."""
        return {name: one for name, one in self.estimates.items() if self.nncf_samples or not one.nncf}

    @property
    def _chosen(self) -> dict[str, Estimate]:
        """Those that are put into the model."""
        return {name: one for name, one in self._estimates.items() if one.quality}

    def _recall(self, lab: Lab, estimates: dict[str, Estimate], windows: Tensor) -> dict[str, Found]:
        estimators = {name: self._estimator(lab, estimate) for name, estimate in estimates.items()}
        rows = {"chunk_tokens": lab.of("graphs").chunk_tokens, "sampled": self.sampled_rows}
        shown = {"progress": lambda windows: bar(windows, "recall")}
        return measure_recall(lab.loaded.model, windows, estimators, self.retentions, **rows, **shown)

    def _estimator(self, lab: Lab, estimate: Estimate) -> Estimator:
        if estimate.nncf:
            return NNCF(lab.banks.nncf_graph(lab.context_tokens, samples=self.nncf_samples))
        if estimate.dynamic:
            offset = lab.offline.key_offset_by(estimate.offset_kind(lab))
            return Quantised(None, estimate.lookup, estimate.bits, estimate.smooth, key_offset=offset)
        grid = estimate.grid(lab)
        requant = None if estimate.output == "float" else lab.banks.requant(grid, estimate.output, estimate.lookup)
        return Quantised(grid, estimate.lookup, estimate.bits, estimate.smooth, requant)

    def _rows(self, lab: Lab, name: str, settings: Estimate, recall: Found) -> list[RecallRow]:
        windows = lab.heldout()
        chunk = lab.of("graphs").chunk_tokens
        row = _common(lab, name, settings, n=len(windows) * measured_rows(windows.shape[1], chunk, self.sampled_rows))
        row, rows = replace(row, sampled=self.sampled_rows, chunk=chunk), []
        for at, retention in enumerate(self.retentions):
            for granularity in GRANULARITIES:
                recall_row = replace(row, retention=retention, granularity=granularity)
                value, layer, head = recall.worst(granularity, at)
                rows.append(replace(recall_row, metric="recall", value=recall.mean(granularity, at)))
                rows.append(replace(recall_row, metric="worst_head_recall", value=value, layer=layer, head=head))
                rows += [
                    replace(recall_row, metric="head_recall", value=value, layer=layer, head=head)
                    for layer, heads in enumerate(recall.heads[granularity][at])
                    for head, value in enumerate(heads)
                ]
            rows.append(replace(row, retention=retention, metric="check", value=float(recall.passes(at))))
        return rows + [replace(row, metric=metric, value=value) for metric, value in recall.figures.items()]

    def _quality_rows(self, lab: Lab, units: Units, held_to: Dense | None) -> list[RecallRow]:
        """Loss and fidelity of the whole model at the run's retention, uniform over heads, for the estimates that ask for it.

        Then each of them is compared with the reference, window by window: by loss, and where `evaluation.divergence_windows`
        asks for it, by divergence from dense attention.
        """
        chosen = self._chosen
        if not chosen:
            return []
        windows, (retention,) = lab.heldout(windows=self.quality_windows), lab.retentions
        say(f"quality: {len(chosen)} of them in the model at retention {retention:g}, {len(windows)} windows")
        dense = units.get("dense", lambda: asdict(measure_cell(lab, windows, None)))
        common = {"retention": retention, "estimate_device": "none" if lab.gpu else lab.device.label, "unit": "nat"}
        cells, increases = {}, {}
        for name, estimate in bar(list(chosen.items()), "quality"):
            cells[name] = units.get(_unit(name), lambda one=estimate: asdict(self._quality(lab, one, windows, held_to)))
            row = replace(_common(lab, name, estimate, n=len(windows)), **common)
            increases[name] = replace(row, metric="loss_increase", value=cells[name]["loss"] - dense["loss"])
        for name, full in lab.full.items():
            cells[name] = units.get(name, lambda full=full: asdict(self._full(lab, full, windows, held_to)))
            row = replace(full_row(lab, lab.row(RecallRow), name), n=len(windows), unit="nat", key_offset=full.key_offset)
            increases[name] = replace(row, metric="loss_increase", value=cells[name]["loss"] - dense["loss"])
        reference = self.reference or next(iter(chosen))
        pairs = [(name, reference) for name in increases if name != reference]
        losses = {name: cell["window_losses"] for name, cell in cells.items()}
        rows = list(increases.values())
        rows += [
            replace(row, metric="loss_increase_error", value=paired_error(losses[name], dense["window_losses"]))
            for name, row in increases.items()
        ]
        observed = windows[: lab.of("evaluation").fidelity_windows].numel()
        for name, row in increases.items():
            figures = cells[name]["fidelity"]
            rows += [replace(row, metric=metric, value=value, n=observed, unit="1") for metric, value in figures.items()]
        rows += comparison_rows(increases, losses, pairs)
        if held_to:
            divergences = {name: cell["window_divergences"] for name, cell in cells.items()}
            for name, row in increases.items():
                rows += divergence_rows(row, divergences[name], windows.shape[1])
            rows += comparison_rows(increases, divergences, pairs, by="divergence")
        return rows

    def _full(self, lab: Lab, full: FullInt8, windows: Tensor, held_to: Dense | None) -> Cell:
        return measure_cell(lab, windows, FullAttachment(full, lab.offline.attention_ranges(full.key_offset)), held_to)

    def _quality(self, lab: Lab, estimate: Estimate, windows: Tensor, held_to: Dense | None) -> Cell:
        profile = lab.offline.profile(UNIFORM, lab.retentions[0])
        unbanked = estimate.dynamic or estimate.smooth or estimate.nncf or estimate.bits != 8  # nothing that a bank would hold
        if unbanked or lab.gpu:
            return measure_cell(lab, windows, Attachment(profile, self._estimator(lab, estimate)), held_to)
        grid = estimate.grid(lab)
        profile = replace(profile, scales=grid)
        requant = None if estimate.output == "float" else lab.banks.requant(grid, estimate.output, estimate.lookup)
        inputs = "unit" if lab.device.name == "CPU" else inputs_for("auto", lab.device.name)  # one graph for all buckets
        form = GraphForm(inputs, requant)
        shapes, _ = lab.banks.shapes(form, pairs=len(grid.pairs))
        bank = GraphBank.build(profile, shapes, device=lab.device.name, form=form, distance=estimate.lookup)
        return measure_cell(lab, windows, Attachment(profile, Int8Graph(bank)), held_to)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        """Recall against retention and by head; and against buckets and σ where these vary."""
        drawn = {"buckets": draw_fig14(rows)} if rows.sigma.nunique() > 2 else {}
        return drawn | {"recall": draw_recall(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A line for each estimate: recall by row and pooled, the worst head, the check, and what happened to the values.

        Then which estimates' losses differ.
        """
        retentions = sorted(rows[rows.metric == "recall"].retention.unique())
        least = retentions[0]
        table = Table(
            "recall by row, %", *(f"{retention:.0%}" for retention in retentions), f"pooled {least:.0%}", "worst head", "check",
            "score correlation", "clipped", "q, k zero", "loss +nat", title=title,
        )  # fmt: skip
        whole = attending_to_all(rows)
        for name, cell in rows[~rows.method.isin(whole.method)].groupby("method", sort=False):
            by_row = cell[cell.granularity == "row"]
            means = by_row[by_row.metric == "recall"].set_index("retention").value
            worst = by_row[(by_row.metric == "worst_head_recall") & (by_row.retention == least)].iloc[0]
            pooled = cell[(cell.metric == "recall") & (cell.granularity == "pooled") & (cell.retention == least)].value.iloc[0]
            check = cell[(cell.metric == "check") & (cell.retention == least)].value.iloc[0]
            figures = cell.groupby("metric").value.first()
            table.add_row(
                name,
                *(f"{100 * means[retention]:.2f}" for retention in retentions),
                f"{100 * pooled:.2f}",
                f"{100 * worst.value:.1f} ({worst.layer}.{worst['head']})",
                "pass" if check else "fail",
                f"{figures['score_correlation']:.4f}" if "score_correlation" in figures else "",
                _percent(figures, "clipped_heads"),
                f"{_percent(figures, 'q_zero')}, {_percent(figures, 'k_zero')}" if "q_zero" in figures else "",
                f"{figures['loss_increase']:.4f}" if "loss_increase" in figures else "",
            )
        for one in whole[whole.metric == "loss_increase"].itertuples():
            table.add_row(f"{one.method}, every key", *[""] * (len(table.columns) - 2), f"{one.value:.4f}")
        if retentions == sorted(TABLE_4_RETENTIONS):
            for model, values in TABLE_4.items():
                table.add_row(f"paper: {model}", *(f"{value:.2f}" for value in values), style="dim")
        return Group(table, *verdicts.compared(rows))


def _unit(name: str) -> str:
    """By what name the model's loss with an estimate is kept."""
    return f"estimate {name}"


def _common(lab: Lab, name: str, settings: Estimate, *, n: int) -> RecallRow:
    row = replace(lab.row(RecallRow), method=name, n=n, estimator="int8", estimate_device="none")
    row = replace(row, key_offset=settings.offset_kind(lab))
    if settings.nncf:
        return replace(row, estimator="nncf", estimate_device="CPU", buckets=1)
    if settings.dynamic:
        return replace(row, lookup="dynamic")
    grid = ScaleGrid(*[Mean(settings.sigma, settings.steps).scales([1.0])] * 2, settings.pattern)
    return replace(row, buckets=len(grid.pairs), sigma=settings.sigma, lookup=settings.lookup)


def _percent(figures: pd.Series, metric: str) -> str:
    return f"{100 * figures[metric]:.1f}%" if metric in figures else ""
