"""The offline stage by itself: what was measured of every head and layer, how sure it is, and what follows from it."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from rich.console import Group
from rich.table import Table
from scipy import stats

from experiments.lab import Lab, MethodSettings
from experiments.part_building import build
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from experiments.studies.quality import budget_rows, head_rows
from shadowattn.artifacts import Units
from shadowattn.offline import Stability, layer_grids, report_scales, save_profile, scale_grid, stability
from shadowattn.offline.allocators import allot
from shadowattn.offline.artifact_files import write_importance, write_measurements, write_retention
from shadowattn.offline.concentration import measure_concentration
from shadowattn.offline.grids.mean import Mean
from shadowattn.offline.grids.quantile import Quantile
from shadowattn.reporting.figures.fig6 import draw as draw_fig6
from shadowattn.reporting.figures.fig7 import draw as draw_fig7
from shadowattn.reporting.figures.importance import draw as draw_importance
from shadowattn.reporting.figures.need import draw as draw_need
from shadowattn.reporting.figures.retention import draw as draw_retention
from shadowattn.reporting.need import need_and_signals
from shadowattn.reporting.rows import PlacedRow
from shadowattn.types import Importance, RetentionProfile


@dataclass(frozen=True)
class Offline(Study):
    """Every allocator of the compared methods at every retention; importance, sensitivities and scales by what they measure.

    `resamples`: of the windows, for how much a head's retention depends on them.
    """

    resamples: int = 20
    on_gpu: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "retention", "retentions", "method", "compare", "estimator", "allocator"),
        *("selection", "importance", "sensitivity", "calibration", "key_offset", "grid", "graphs"),
    )
    headline: ClassVar[tuple[str, ...]] = ("sparse_mean_retention", "largest_retention", "q_clipped_heads")

    def __post_init__(self):
        check_count("study.resamples", self.resamples, least=2)

    def measure(self, lab: Lab) -> list[PlacedRow]:
        """Rows of importance, retention, stability and scales; profiles and the artifact's files go to the run's folder."""
        folder, offline = lab.folder, lab.offline
        row = replace(lab.row(PlacedRow), context_tokens=lab.of("importance").window_tokens, n=offline.importance.tokens)
        rows = list(_importance_rows(lab, row))
        say(f"retention: {len(lab.methods)} allocators at {len(lab.retentions)} retentions")
        for retention in lab.retentions:
            for name, method in lab.methods.items():
                profile = offline.profile(method.allocator, retention)
                save_profile(profile, folder / "profiles" / f"{name}@{retention:g}.json")
                write_retention(profile.retention, folder / "artifact" / f"head-retention.{name}@{retention:g}.txt")
                method_row = replace(row, method=name, allocator=profile.allocator, retention=retention)
                rows += _retention_rows(method_row, profile)
                if "importance" in build(method.allocator).needs and len(offline.losses.base) > 1:
                    rows += _stability_rows(method_row, self._stability(lab, method, retention), self.resamples)
        rows += _sensitivity_rows(lab, row)
        rows += _concentration_rows(lab, row, lab.units("concentration"))
        rows += _signal_rows(row, pd.DataFrame([asdict(one) for one in rows]))
        _export(lab, folder / "artifact")
        rows += _observed_rows(lab, row)
        rows += _scale_rows(lab, row, lab.units("scale_report"))
        return rows

    def _stability(self, lab: Lab, method: MethodSettings, retention: float) -> Stability:
        def allotted(importance: Importance) -> list[list[float]]:
            return allot(build(method.allocator), lab.shape, retention, importance)

        return stability(lab.offline.losses, allotted, resamples=self.resamples, seed=lab.seed)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        """Importance, retention by every allocator, and the paper's Fig. 6 and Fig. 7."""
        drawn = {"need": draw_need(rows)} if (rows.metric == "sensitivity_loss").any() else {}
        drawn["importance"] = draw_importance(rows)
        drawn["fig6"] = draw_fig6(rows)
        drawn["retention"] = draw_retention(rows)
        return drawn | ({"fig7": draw_fig7(rows)} if (rows.metric == "q_scale").any() else {})

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """Allocators, stability and grids, for a terminal."""
        parts = Table(title=title, title_justify="left")
        columns = {
            "mean_retention": "mean, all layers",
            "sparse_mean_retention": "mean, sparse layers",
            "dense_layers": "dense layers",
            "least_retention": "least",
            "largest_retention": "largest",
            "retention_spread": "spread (mean sd)",
            "largest_spread": "spread (largest)",
        }
        _fill(parts, rows[rows.metric.isin(columns)], ["method", "retention"], columns)
        grids = Table(title="static scales, by grid", title_justify="left")
        shares = {
            "q_clipped_heads": "Q heads clipped",
            "k_clipped_heads": "K heads clipped",
            "q_zero": "Q values to 0",
            "k_zero": "K values to 0",
            "q_saturated": "Q values cut",
            "k_saturated": "K values cut",
            "largest_bucket": "most used bucket",
        }
        _fill(grids, rows[rows.metric.isin(shares)], ["method"], shares)
        return Group(parts, *_sentences(rows), grids)


def _importance_rows(lab: Lab, row: PlacedRow) -> Iterator[PlacedRow]:
    importance = lab.offline.importance
    yield replace(row, metric="loss", value=math.log(importance.base_ppl), unit="nat")
    yield replace(row, metric="perplexity", value=importance.base_ppl)
    ablations = len(importance.layer_ppl) * (1 + len(importance.head_ppl[0]))
    forwards = lab.offline.losses.window_forwards
    yield replace(row, metric="windows_an_ablation", value=forwards / ablations, n=ablations)
    yield from ablation_rows(row, importance)


def ablation_rows(row: PlacedRow, importance: Importance) -> Iterator[PlacedRow]:
    """Perplexity, loss and its increase without each layer and without each head."""
    base = math.log(importance.base_ppl)
    row = replace(row, method=f"ablate_{importance.ablation}", n=importance.tokens)
    for layer, (whole, heads) in enumerate(zip(importance.layer_ppl, importance.head_ppl, strict=True)):
        yield from _ablation_rows(replace(row, layer=layer, method="bypass"), whole, base)
        for head, perplexity in enumerate(heads):
            yield from _ablation_rows(replace(row, layer=layer, head=head), perplexity, base)


def _ablation_rows(row: PlacedRow, perplexity: float, base: float) -> Iterator[PlacedRow]:
    yield replace(row, metric="perplexity", value=perplexity)
    yield replace(row, metric="loss", value=math.log(perplexity), unit="nat")
    yield replace(row, metric="loss_increase", value=math.log(perplexity) - base, unit="nat")


def _retention_rows(row: PlacedRow, profile: RetentionProfile) -> Iterator[PlacedRow]:
    values = [value for layer in profile.retention for value in layer]
    row = replace(row, n=len(values))
    yield from budget_rows(row, profile)
    yield replace(row, metric="least_retention", value=min(values))
    yield replace(row, metric="largest_retention", value=max(values))
    yield from head_rows(row, profile)


def _sensitivity_rows(lab: Lab, row: PlacedRow) -> Iterator[PlacedRow]:
    """What each head alone loses at each retention, by every measure that was taken."""
    for measure, sensitivity in sorted(lab.offline.sensitivities.items()):
        head_row = replace(row, method="one_head", metric=f"sensitivity_{measure}", n=sensitivity.tokens)
        head_row = replace(head_row, unit="1" if measure == "error" else "nat")
        for layer, heads in enumerate(sensitivity.cost):
            for head, costs in enumerate(heads):
                for retention, value in zip(sensitivity.retentions, costs, strict=True):
                    yield replace(head_row, retention=retention, value=value, layer=layer, head=head)


def _concentration_rows(lab: Lab, row: PlacedRow, units: Units) -> Iterator[PlacedRow]:
    """How many keys each head looks at."""
    graphs = lab.of("graphs")
    windows = lab.calibration(tokens=lab.context_tokens, windows=graphs.calibration_windows)

    def measured() -> dict:
        return asdict(measure_concentration(lab.loaded.model, windows, chunk_tokens=graphs.chunk_tokens))

    dense_row = replace(row, method="dense", n=windows.numel(), context_tokens=lab.context_tokens)
    for metric, table in units.get("heads", measured).items():
        for layer, heads in enumerate(table):
            for head, value in enumerate(heads):
                yield replace(dense_row, metric=metric, value=value, unit="1", layer=layer, head=head)


def _signal_rows(row: PlacedRow, rows: pd.DataFrame) -> Iterator[PlacedRow]:
    """How well each measure of a head ranks heads by the loss of keeping fewer keys: Spearman's correlation over all heads."""
    for retention in sorted(rows[(rows.metric == "sensitivity_loss") & (rows.retention < 1)].retention.unique()):
        need, signals = need_and_signals(rows, retention)
        for name, values in signals.items():
            correlation = float(stats.spearmanr(values, need).statistic)
            signal_row = replace(row, method=name, retention=retention, n=len(need))
            yield replace(signal_row, metric="need_rank_correlation", value=correlation)


def _stability_rows(row: PlacedRow, rank_stability: Stability, resamples: int) -> Iterator[PlacedRow]:
    heads = sum(map(len, rank_stability.retention_spread))
    yield replace(row, metric="head_rank_correlation", value=rank_stability.head_rank, n=heads)
    yield replace(row, metric="layer_rank_correlation", value=rank_stability.layer_rank, n=len(rank_stability.retention_spread))
    yield replace(row, metric="retention_spread", value=rank_stability.mean_spread, n=resamples)
    yield replace(row, metric="largest_spread", value=rank_stability.largest_spread, n=resamples)


def _observed_rows(lab: Lab, row: PlacedRow) -> Iterator[PlacedRow]:
    """The scales that Q and K of every head and chunk of the calibration text would take, and those of the grid."""
    scale_row = replace(row, method="observed", n=1, context_tokens=lab.context_tokens)
    for layer, head, q, k in lab.offline.observations.pairs:
        yield replace(scale_row, metric="q_scale", value=q, layer=layer, head=head)
        yield replace(scale_row, metric="k_scale", value=k, layer=layer, head=head)
    scale_row = replace(scale_row, method="grid", n=len(lab.offline.observations.pairs))
    for metric, scales in {"q_scale": lab.offline.grid.q_scales, "k_scale": lab.offline.grid.k_scales}.items():
        yield from (replace(scale_row, metric=metric, value=scale) for scale in scales)


def _scale_rows(lab: Lab, row: PlacedRow, units: Units) -> Iterator[PlacedRow]:
    """The run's own grid beside the mean and the quantile grid, each for the whole model and layer by layer."""
    say("scales: clipping, zeros and saturation of each grid, on other calibration windows")
    observed = lab.offline.observations
    grids = {"grid": lab.offline.grid}
    for name, grid in {"mean": Mean(), "quantile": Quantile()}.items():
        grids[name] = scale_grid(observed, grid)
        grids[f"{name}_per_layer"] = layer_grids(observed, grid)
    graphs = lab.of("graphs")
    windows = lab.calibration(tokens=lab.context_tokens, windows=graphs.calibration_windows + 1)[-1:]

    def report() -> dict:
        fits = report_scales(
            lab.loaded.model, windows, grids, chunk_tokens=graphs.chunk_tokens, progress=lambda w: bar(w, "scale report")
        )
        return {name: asdict(fit) for name, fit in fits.items()}

    for name, fit in units.get("report", report).items():
        assigned = fit.pop("assigned")
        grid_row = replace(row, method=name, n=sum(assigned), context_tokens=lab.context_tokens)
        for metric, value in fit.items():
            yield replace(grid_row, metric=metric, value=value)
        yield replace(grid_row, metric="largest_bucket", value=max(assigned) / sum(assigned))
        for bucket, count in enumerate(assigned):
            yield replace(grid_row, metric=f"assigned_bucket_{bucket}", value=float(count), unit="heads")


def _export(lab: Lab, folder: Path) -> None:
    """What other tools read: the artifact's formats."""
    name = lab.loaded.name
    write_importance(lab.offline.importance, folder / "heads.txt", folder / "layers.txt", model=name)
    calibration = {
        "state_dict": lab.loaded.fingerprint,
        "corpus_sha256": lab.corpus.sha256,
        "samples": len(lab.offline.losses.base),
        "context_length": lab.offline.losses.window_tokens,
        "seed": lab.seed,
        **OmegaConf.to_container(lab.of("importance"), resolve=True),
    }
    write_measurements(lab.offline.importance, folder / "measurements.json", model=name, calibration=calibration)


def _fill(table: Table, rows: pd.DataFrame, index: list[str], columns: dict[str, str]) -> None:
    wide = rows.pivot_table(index=index, columns="metric", values="value", sort=False).reindex(columns=list(columns))
    for heading in [*index, *columns.values()]:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for keys, values in zip(wide.index, wide.to_numpy(), strict=True):
        cells = ["–" if math.isnan(value) else f"{value:.4g}" for value in values]
        table.add_row(*(str(key) for key in (keys if isinstance(keys, tuple) else [keys])), *cells)


def _placed(rows: pd.DataFrame, metric: str, place) -> float:
    placed_rows = rows[(rows.metric == metric) & (rows.layer == place.layer) & (rows["head"] == place.head)]
    return float(placed_rows.value.iloc[0])


def _sentences(rows: pd.DataFrame) -> Iterator[str]:
    ranks = rows[rows.metric.isin(["head_rank_correlation", "layer_rank_correlation"])].drop_duplicates("metric")
    for rank in ranks.itertuples():
        yield f"{rank.metric.split('_')[0]}s ranked by one half of the windows and by the other: Spearman {rank.value:.3f}"
    increases = rows[(rows.metric == "loss_increase") & (rows["head"] >= 0)].sort_values("value", ascending=False)
    total = increases.value.clip(lower=0).sum()
    if total > 0:
        most = increases.head(2)
        heads = " and ".join(f"layer {int(line.layer)} head {int(line.head)}" for line in most.itertuples())
        yield f"{most.value.sum() / total:.0%} of the heads' loss increase is that of {heads}"
    ranked = rows[rows.metric == "need_rank_correlation"]
    for retention, signals in ranked[ranked.retention == ranked.retention.min()].groupby("retention"):
        correlations = ", ".join(f"{line.method.replace('_', ' ')} {line.value:.2f}" for line in signals.itertuples())
        yield (
            f"rank correlation (Spearman, {signals.n.iloc[0]} heads) with the loss of keeping {retention:.0%} of the keys: "
            f"{correlations}"
        )
    sparse = rows[(rows.metric == "sensitivity_loss") & (rows.retention < 1)]
    for line in most.itertuples() if total > 0 and len(sparse) else ():
        head_row = sparse[(sparse.layer == line.layer) & (sparse["head"] == line.head)].sort_values("retention").iloc[0]
        yield (
            f"layer {int(line.layer)} head {int(line.head)}: {line.value:+.4f} nat without it, "
            f"{head_row.value:+.4f} nat where it keeps {head_row.retention:.0%} of its keys; "
            f"{_placed(rows, 'top_weight', line):.1%} of its attention is on one key"
        )
