"""The quality of the estimate: recall of the exact top-k by every way to quantise, and what that does to the model."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.console import Group
from rich.table import Table

from experiments import study
from experiments.comparisons import comparison_rows
from experiments.progress import bar, say
from experiments.setup import OUTPUTS, Setup, check_choices
from experiments.stages import UNIFORM, Offline, graph_shapes, make_profile, output_requant
from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import prefill_chunks
from shadowattn.evaluation.recall import GRANULARITIES, POOLED_ROWS, Recall, measure_recall, measured_rows
from shadowattn.graphs import GraphBank, GraphForm, GraphShape
from shadowattn.graphs.buckets import DISTANCES
from shadowattn.graphs.quantization import compile_int8, input_steps, nncf_graph
from shadowattn.offline.grids.mean import Mean
from shadowattn.offline.scales import scale_grid, watch_attention
from shadowattn.online.attention import Request
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.fixed_graph import FixedGraph
from shadowattn.online.estimators.int8 import Int8
from shadowattn.online.estimators.quantised import Quantised
from shadowattn.reporting import recall_figures, verdicts
from shadowattn.reporting.rows import PlacedRow
from shadowattn.types import ScaleGrid

_NNCF_SAMPLES = 64


@dataclass(frozen=True)
class RecallRow(PlacedRow):
    """A row about an estimate: how many buckets it has (0: none), their σ and lookup, and `granularity` row or pooled.

    `sampled` rows of every `chunk` are ranked, evenly spread over it; 0 where the row is about no ranking. `n` counts them.
    """

    buckets: int = 0
    sigma: float = math.nan
    lookup: str = ""
    granularity: str = ""
    sampled: int = 0
    chunk: int = 0


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[RecallRow]:
    """Rows of every estimate, one after the other; those finished in `folder` before are not measured again."""
    estimates = {str(name): settings for name, settings in setup.config.recall.estimates.items()}
    _check(estimates, setup.config.recall)
    units, windows = Units(folder / "cells"), setup.heldout()
    say(f"recall: {len(estimates)} ways to estimate, {len(windows)} windows of {windows.shape[1]} tokens")
    rows = []
    for name, settings in bar(list(estimates.items()), "recall"):
        found = Recall(**units.get(name, lambda settings=settings: asdict(_recall(setup, offline, settings, windows))))
        rows += _rows(setup, name, settings, found)
    return rows + _quality_rows(setup, offline, estimates, units)


def _check(estimates: Mapping[str, DictConfig], recall: DictConfig) -> None:
    retentions = list(recall.retentions)
    if not estimates:
        raise InputError("recall.estimates: expected at least one way to estimate, got none; see conf/exp/table4.yaml")
    if not retentions or not all(0 < retention <= 1 for retention in retentions):
        raise InputError(f"recall.retentions: expected at least one, above 0 and at most 1, got {retentions}")
    for name, settings in estimates.items():
        check_choices(f"recall.estimates.{name}", settings, {"output": OUTPUTS, "lookup": DISTANCES})
        Mean(settings.sigma, settings.steps, settings.pattern)
        Quantised(bits=settings.bits, smooth=settings.smooth)
        if settings.output != "float" and (settings.dynamic or settings.smooth or settings.bits != 8):
            raise InputError(f"recall.estimates.{name}.output: {settings.output} needs 8 bits, a grid and no smoothing")
    chosen = [name for name, settings in estimates.items() if settings.quality]
    if recall.reference is not None and recall.reference not in chosen:
        raise InputError(
            f"recall.reference: expected one of the estimates with quality=true ({', '.join(chosen) or 'there are none'}), "
            f"got {recall.reference!r}"
        )
    if recall.quality_windows < 1:
        raise InputError(f"recall.quality_windows: expected at least 1, got {recall.quality_windows}")


def _grid(offline: Offline, settings: DictConfig) -> ScaleGrid:
    return scale_grid(offline.observations, Mean(settings.sigma, settings.steps, settings.pattern))


def _recall(setup: Setup, offline: Offline, settings: DictConfig, windows) -> Recall:
    made = {"one": _estimate(setup, offline, settings)}
    chunk_tokens = setup.config.graphs.chunk_tokens
    return measure_recall(setup.loaded.model, windows, made, setup.config.recall.retentions, chunk_tokens=chunk_tokens)["one"]


def _estimate(setup: Setup, offline: Offline, settings: DictConfig) -> Estimator:
    if settings.nncf:
        return _nncf(setup)
    grid = None if settings.dynamic else _grid(offline, settings)
    requant = None if settings.output == "float" else output_requant(setup, grid, settings.output, settings.lookup)
    return Quantised(grid, settings.lookup, settings.bits, settings.smooth, requant)


def _nncf(setup: Setup) -> FixedGraph:
    """NNCF's graph for a key head and its query heads, calibrated on samples of all layers of the calibration text."""
    model, chunk_tokens = setup.shape, setup.config.graphs.chunk_tokens
    group = model.heads // model.kv_heads
    shape = GraphShape(group, chunk_tokens, model.head_dim, setup.context_tokens, group)
    samples = []

    def observe(layer: int, q, k, v, scale: float, request: Request) -> None:
        if k.shape[2] == setup.context_tokens:  # the last chunk, the only one that fills the graph
            for g in range(model.kv_heads):
                rows = np.zeros((1, 1, group * chunk_tokens, model.head_dim), np.float32)
                given = q[0, g * group : (g + 1) * group].float().numpy().reshape(1, 1, -1, model.head_dim)
                rows[:, :, : given.shape[2]] = given
                samples.append((rows, k[:, g : g + 1].float().numpy().copy()))

    windows = setup.calibration(tokens=setup.context_tokens, windows=setup.config.graphs.calibration_windows)
    with watch_attention(setup.loaded.model, observe):
        for window in windows:
            for _ in prefill_chunks(setup.loaded.model, window, chunk_tokens=chunk_tokens):
                pass
    kept = samples[:: -(-len(samples) // _NNCF_SAMPLES)]
    graph = nncf_graph(shape, kept)
    return FixedGraph(compile_int8(graph, what="nncf"), shape, input_steps(graph))


def _rows(setup: Setup, name: str, settings: DictConfig, found: Recall) -> list[RecallRow]:
    windows = setup.heldout()
    chunk = setup.config.graphs.chunk_tokens
    row = _common(setup, name, settings, n=len(windows) * measured_rows(windows.shape[1], chunk))
    row, rows = replace(row, sampled=POOLED_ROWS, chunk=chunk), []
    for at, retention in enumerate(setup.config.recall.retentions):
        for granularity in GRANULARITIES:
            of = replace(row, retention=retention, granularity=granularity)
            value, layer, head = found.worst(granularity, at)
            rows.append(replace(of, metric="recall", value=found.mean(granularity, at)))
            rows.append(replace(of, metric="worst_head_recall", value=value, layer=layer, head=head))
            rows += [
                replace(of, metric="head_recall", value=value, layer=layer, head=head)
                for layer, heads in enumerate(found.heads[granularity][at])
                for head, value in enumerate(heads)
            ]
        rows.append(replace(row, retention=retention, metric="gate", value=float(found.passes(at))))
    return rows + [replace(row, metric=metric, value=value) for metric, value in found.figures.items()]


def _common(setup: Setup, name: str, settings: DictConfig, *, n: int) -> RecallRow:
    common = replace(study.common_row(setup, setup.heldout()), method=name, n=n, estimator="int8", estimate_device="none")
    if settings.nncf:
        return RecallRow(**vars(common) | {"estimator": "nncf", "estimate_device": "CPU"}, buckets=1)
    if settings.dynamic:
        return RecallRow(**vars(common), lookup="dynamic")
    grid = ScaleGrid(*[Mean(settings.sigma, settings.steps).scales([1.0])] * 2, settings.pattern)
    return RecallRow(**vars(common), buckets=len(grid.pairs), sigma=settings.sigma, lookup=settings.lookup)


def _quality_rows(setup: Setup, offline: Offline, estimates: Mapping[str, DictConfig], units: Units) -> list[RecallRow]:
    """Loss of the whole model at the run's retention, uniform over heads, for the estimates that ask for it; then each of them
    compared with the reference, window by window."""
    chosen = {name: settings for name, settings in estimates.items() if settings.quality}
    if not chosen:
        return []
    windows = setup.heldout(windows=setup.config.recall.quality_windows)
    say(f"quality: {len(chosen)} of them in the model at retention {setup.config.retention:g}, {len(windows)} windows")
    dense = units.get("dense", lambda: asdict(study.measure_cell(setup, windows, None)))
    common = {"retention": setup.config.retention, "estimate_device": setup.device.label, "unit": "nat"}
    losses, increases = {}, {}
    for name, settings in bar(list(chosen.items()), "quality"):
        cell = units.get(f"quality-{name}", lambda settings=settings: asdict(_quality(setup, offline, settings, windows)))
        losses[name] = cell["window_losses"]
        row = replace(_common(setup, name, settings, n=len(windows)), **common)
        increases[name] = replace(row, metric="loss_increase", value=cell["loss"] - dense["loss"])
    reference = setup.config.recall.reference or next(iter(chosen))
    rows = list(increases.values())
    rows += [
        replace(row, metric="loss_increase_error", value=study.paired_error(losses[name], dense["window_losses"]))
        for name, row in increases.items()
    ]
    return rows + comparison_rows(increases, losses, [(name, reference) for name in chosen if name != reference])


def _quality(setup: Setup, offline: Offline, settings: DictConfig, windows) -> study.Cell:
    profile = make_profile(setup, offline, OmegaConf.create({"_target_": UNIFORM}), setup.config.retention)
    if settings.dynamic or settings.smooth or settings.nncf or settings.bits != 8:  # nothing that a bank would hold
        return study.measure_cell(
            setup, windows, study.Attachment(profile, _estimate(setup, offline, settings), setup.config.selection)
        )
    grid = _grid(offline, settings)
    profile = replace(profile, scales=grid)
    requant = None if settings.output == "float" else output_requant(setup, grid, settings.output, settings.lookup)
    form = GraphForm("unit" if setup.device.name == "CPU" else "static", requant)  # one graph for all buckets
    shapes, _ = graph_shapes(setup, form, pairs=len(grid.pairs))
    bank = GraphBank.build(profile, shapes, device=setup.device.name, form=form, distance=settings.lookup)
    return study.measure_cell(setup, windows, study.Attachment(profile, Int8(bank), setup.config.selection))


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """Recall against retention and by head; and against buckets and σ where these vary."""
    recall_figures.recall(rows, folder / "recall.png")
    if rows.sigma.nunique() > 2:
        recall_figures.buckets(rows, folder / "buckets.png")


def table(rows: pd.DataFrame, title: str) -> Group:
    """A line for each estimate: recall by row and pooled, the worst head, the gate, and what happened to the values; then which
    estimates' losses differ."""
    retentions = sorted(rows[rows.metric == "recall"].retention.unique())
    least = retentions[0]
    made = Table(
        "recall by row, %", *(f"{retention:.0%}" for retention in retentions), f"pooled {least:.0%}", "worst head", "gate",
        "score correlation", "clipped", "q, k zero", "loss +nat", title=title,
    )  # fmt: skip
    for name, cell in rows.groupby("method", sort=False):
        by_row = cell[cell.granularity == "row"]
        means = by_row[by_row.metric == "recall"].set_index("retention").value
        worst = by_row[(by_row.metric == "worst_head_recall") & (by_row.retention == least)].iloc[0]
        pooled = cell[(cell.metric == "recall") & (cell.granularity == "pooled") & (cell.retention == least)].value.iloc[0]
        gate = cell[(cell.metric == "gate") & (cell.retention == least)].value.iloc[0]
        figures = cell.groupby("metric").value.first()
        made.add_row(
            name,
            *(f"{100 * means[retention]:.2f}" for retention in retentions),
            f"{100 * pooled:.2f}",
            f"{100 * worst.value:.1f} ({worst.layer}.{worst['head']})",
            "pass" if gate else "fail",
            f"{figures['score_correlation']:.4f}" if "score_correlation" in figures else "",
            _percent(figures, "clipped_heads"),
            f"{_percent(figures, 'q_zero')}, {_percent(figures, 'k_zero')}" if "q_zero" in figures else "",
            f"{figures['loss_increase']:.4f}" if "loss_increase" in figures else "",
        )
    if retentions == sorted(recall_figures.TABLE_4_RETENTIONS):
        for model, values in recall_figures.TABLE_4.items():
            made.add_row(f"paper: {model}", *(f"{value:.2f}" for value in values), style="dim")
    return Group(made, verdicts.comparisons(rows))


def _percent(figures: pd.Series, metric: str) -> str:
    return f"{100 * figures[metric]:.1f}%" if metric in figures else ""
