"""A study: every method at every retention on the same windows, dense first. Cell by cell, so that it can be interrupted."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from hydra.utils import instantiate
from rich.console import Group
from torch import Tensor

from experiments.comparisons import comparison_rows
from experiments.config import SelectionConfig
from experiments.progress import bar, say
from experiments.setup import Setup, make_pipeline, needs_bank, needs_grid, on_device, part_name, rule_options
from experiments.stages import Offline, device_bank, make_profile
from shadowattn.artifacts import Units
from shadowattn.evaluation.fidelity import Fidelity
from shadowattn.evaluation.perplexity import unigram_loss, window_losses
from shadowattn.evaluation.tasks import exact_match_rate
from shadowattn.graphs.bank import GraphBank
from shadowattn.method import attach
from shadowattn.offline import save_profile
from shadowattn.online.attention import Counters
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8_device import Int8Device
from shadowattn.reporting import figures, tables, verdicts
from shadowattn.reporting.flags import quality_flag
from shadowattn.reporting.rows import Row
from shadowattn.types import RetentionProfile

_UNITS = {
    "perplexity": "1",
    "loss": "nat",
    "loss_increase": "nat",
    "loss_increase_error": "nat",
    "sparse_rows": "head rows",
}


@dataclass(frozen=True)
class Cell:
    """What one method measured at one retention. `fidelity` is empty where nothing ran sparse."""

    loss: float
    window_losses: list[float]
    density: float
    sparse_density: float
    sparse_rows: int
    fidelity: dict[str, float]
    launches: int
    clipped_heads: int
    accuracy: float | None  # of the run's task; None where it has no questions


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[Row]:
    """Rows of all cells, and of every method's comparison with the main one."""
    rows = measure_cells(setup, offline, bank, folder)
    main = setup.config.method
    # At retention 1 every method is dense.
    pairs = [((name, at), (main, at)) for at in setup.retentions if at < 1 for name in setup.methods if name != main]
    return rows + comparison_rows(loss_rows(rows), cell_losses(setup, folder), pairs)


def loss_rows(rows: list[Row]) -> dict[tuple[str, float], Row]:
    """The row of each sparse cell's loss, by method and retention."""
    return {(row.method, row.retention): row for row in rows if row.metric == "loss_increase"}


def cell_losses(setup: Setup, folder: Path) -> dict[tuple[str, float], list[float]]:
    """The losses of each finished sparse cell, window by window, by method and retention."""
    units = Units(folder / "cells")
    cells = [(name, retention) for retention in setup.retentions for name in setup.methods]
    return {cell: units.read(cell_key(*cell))["window_losses"] for cell in cells}


def table(rows: pd.DataFrame, title: str) -> Group:
    """The summary, and which methods differ from the main one."""
    return Group(tables.summary_table(rows, title), verdicts.comparisons(rows))


def measure_cells(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[Row]:
    """Rows of all cells; those finished in `folder` before are not measured again."""
    units = Units(folder / "cells")
    windows = setup.heldout()
    floor = unigram_loss(windows)
    cells = [(name, retention) for retention in setup.retentions for name in setup.methods]
    todo = sum(not units.has(cell_key(*cell)) for cell in cells)
    say(f"evaluate: {len(cells)} cells and dense, {len(windows)} windows of {windows.shape[1]} tokens, {todo} cells to do")
    dense = Cell(**units.get("dense", lambda: asdict(measure_cell(setup, windows, None))))
    rows = _dense_rows(setup, dense, windows, floor)
    for name, retention in bar(cells, "evaluate"):
        method = setup.methods[name]
        profile = make_profile(setup, offline, method.allocator, retention)
        if retention == setup.retentions[0]:
            say(f"retention: {name}, {profile.allocator}: {_means(profile)}")
        save_profile(profile, folder / "profiles" / f"{cell_key(name, retention)}.json")

        def measure_method(method=method, profile=profile) -> dict:
            if on_device(method):
                estimator = Int8Device(device_bank(setup, offline, profile, method.selection))
            else:
                built = {"bank": bank} if needs_bank(method.estimator) else {}
                built |= {"grid": profile.scales} if needs_grid(method.estimator) else {}
                estimator = instantiate(method.estimator, **built)
            return asdict(measure_cell(setup, windows, Attachment(profile, estimator, method.selection)))

        cell = Cell(**units.get(cell_key(name, retention), measure_method))
        rows += _cell_rows(setup, name, retention, cell, dense, windows, floor)
        rows += retention_rows(replace(rows[-1], unit="1"), profile)
    return rows


@dataclass(frozen=True)
class Attachment:
    profile: RetentionProfile
    estimator: Estimator
    selection: SelectionConfig


def measure_cell(setup: Setup, windows: Tensor, attached: Attachment | None) -> Cell:
    """Loss on all windows; fidelity on the first few."""
    model, chunk_tokens = setup.loaded.model, setup.config.graphs.chunk_tokens
    fidelity = Fidelity()
    observed = setup.config.evaluation.fidelity_windows if attached else 0

    def context(observers: tuple):
        if attached is None:
            return nullcontext()
        return attach(
            model,
            attached.profile,
            None,
            estimator=attached.estimator,
            chunk_tokens=chunk_tokens,
            kernel=setup.kernel,
            dense_above=setup.dense_above(attached.selection.query_block),
            decode=setup.config.decode,
            pipeline=make_pipeline(setup.config),
            **rule_options(attached.selection),
            observers=observers,
        )

    losses, counters = [], Counters()
    for part, observers in ((windows[:observed], (fidelity,)), (windows[observed:], ())):
        if len(part):
            with context(observers) as sparse:
                losses += window_losses(model, part, chunk_tokens=chunk_tokens).tolist()
                counters += sparse.counters if sparse else Counters()
    accuracy = None
    if setup.questions:
        with context(()) as sparse:
            accuracy = exact_match_rate(model, list(setup.questions), chunk_tokens=chunk_tokens)
    limit = setup.dense_above(attached.selection.query_block) if attached else 0.0
    expected = attached is not None and any(value < limit for layer in attached.profile.retention for value in layer)
    if expected != bool(counters.sparse_rows):
        raise RuntimeError(f"the sparse path ran on {counters.sparse_rows} head rows, which its profile does not explain")
    return Cell(
        loss=sum(losses) / len(losses),
        window_losses=losses,
        density=counters.density,
        sparse_density=counters.sparse_density,
        sparse_rows=counters.sparse_rows,
        fidelity=fidelity.metrics(),
        launches=attached.estimator.launched if attached else 0,
        clipped_heads=attached.estimator.clipped if attached else 0,
        accuracy=accuracy,
    )


def _cell_rows(setup: Setup, name: str, retention: float, cell: Cell, dense: Cell, windows: Tensor, floor: float) -> list[Row]:
    method = setup.methods[name]
    flag = quality_flag(loss=cell.loss, dense_loss=dense.loss, floor_loss=floor)
    row = replace(
        common_row(setup, windows),
        method=name,
        retention=retention,
        estimator=part_name(method.estimator),
        allocator=part_name(method.allocator),
        estimate_device=setup.device.label if needs_bank(method.estimator) else "none",
        **method.selection,
        dense_above=setup.dense_above(method.selection.query_block),
    )
    predicted = windows.numel() - len(windows)
    rows = [
        replace(row, metric="perplexity", value=math.exp(cell.loss), n=predicted, flag=flag),
        replace(row, metric="loss", value=cell.loss, n=predicted, flag=flag),
        replace(row, metric="loss_increase", value=cell.loss - dense.loss, n=predicted, flag=flag),
        replace(row, metric="loss_increase_error", value=paired_error(cell.window_losses, dense.window_losses), n=len(windows)),
        replace(row, metric="density", value=cell.density, n=windows.numel()),  # attention also runs on a window's last token
        replace(row, metric="sparse_density", value=cell.sparse_density, n=windows.numel()),
        replace(row, metric="sparse_rows", value=float(cell.sparse_rows), n=windows.numel()),
        replace(row, metric="graph_launches", value=float(cell.launches), n=windows.numel()),
        replace(row, metric="clipped_heads", value=float(cell.clipped_heads), n=windows.numel()),
    ]
    observed = windows[: setup.config.evaluation.fidelity_windows].numel()
    rows += [replace(row, metric=metric, value=value, n=observed) for metric, value in cell.fidelity.items()]
    rows += _accuracy_rows(setup, row, cell)
    return [replace(r, unit=_UNITS.get(r.metric, "1")) for r in rows]


def retention_rows(row: Row, profile: RetentionProfile) -> list[Row]:
    """Mean retention over all layers and over those that are not dense: a kernel sees the second."""
    row = replace(row, n=sum(map(len, profile.retention)), flag="")
    return [
        replace(row, metric="mean_retention", value=profile.mean_retention),
        replace(row, metric="sparse_mean_retention", value=profile.sparse_mean_retention),
        replace(row, metric="dense_layers", value=float(len(profile.dense_layers))),
    ]


def _means(profile: RetentionProfile) -> str:
    dense = ", ".join(map(str, profile.dense_layers)) or "none"
    return f"mean {profile.mean_retention:.4g}, over sparse layers {profile.sparse_mean_retention:.4g}, dense layers: {dense}"


def paired_error(losses: Sequence[float], dense: Sequence[float]) -> float:
    """Standard error of the loss increase, paired window by window; not a number for a single window."""
    increases = np.subtract(losses, dense)
    return float(increases.std(ddof=1) / len(increases) ** 0.5) if len(increases) > 1 else math.nan


def _accuracy_rows(setup: Setup, row: Row, cell: Cell) -> list[Row]:
    if cell.accuracy is None:
        return []
    return [replace(row, metric="accuracy", value=cell.accuracy, n=len(setup.questions))]


def _dense_rows(setup: Setup, dense: Cell, windows: Tensor, floor: float) -> list[Row]:
    flag = quality_flag(loss=dense.loss, dense_loss=dense.loss, floor_loss=floor)
    row = replace(common_row(setup, windows), flag=flag)
    return [
        replace(row, metric="perplexity", value=math.exp(dense.loss)),
        replace(row, metric="loss", value=dense.loss, unit="nat"),
        replace(row, metric="unigram_loss", value=floor, unit="nat", n=windows.numel()),
        *_accuracy_rows(setup, replace(row, flag=""), dense),
    ]


def common_row(setup: Setup, windows: Tensor) -> Row:
    """What all rows of a run have in common, filled in as for dense attention."""
    return Row(
        experiment=setup.config.experiment,
        config_hash=setup.config_hash,
        metric="",
        value=math.nan,
        unit="1",
        method="dense",
        model=setup.loaded.name,
        retention=1.0,
        n=windows.numel() - len(windows),
        seed=setup.config.seed,
        path_kind="quality",
        estimate_device="none",
        measured="measured",
        kernel=setup.kernel,
        estimator="none",
        allocator="none",
        query_block=1,
        block_score="none",
        context_tokens=setup.context_tokens,
        data=setup.corpus.name,
        corpus_sha256=setup.corpus.sha256,
        flag="",
        dense_above=setup.dense_above(1),
    )


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """Quality against retention, and what the offline stage found and allotted."""
    figures.quality_against_retention(rows, folder / "quality.png")
    if offline.importance is not None:
        figures.head_importance(offline.importance, folder / "importance.png")
    figures.scale_distribution(list(offline.observations.pairs), offline.grid, folder / "scales.png")
    profile = make_profile(setup, offline, setup.methods[setup.config.method].allocator, setup.retentions[0])
    title = f"retention by {profile.allocator}, mean {profile.mean_retention:.3g}"
    figures.retention_map(profile.retention, folder / "retention.png", title)


def cell_key(name: str, retention: float) -> str:
    """What the file of a cell is called."""
    return f"{name}@{retention:g}"
