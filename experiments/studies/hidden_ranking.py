"""Lists made a layer early in the engine: how much of their time passes beside attention, and what they lose."""

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from experiments.cells import attachment, method_row, paired_error
from experiments.engines import build_engine, check_engine, check_ranks_early, refuse_look_ahead
from experiments.lab import Lab
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.engine.ahead import AHEAD_STAGES
from shadowattn.engine.engine import Engine
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import losses_of
from shadowattn.reporting.figures.hidden_ranking import draw as draw_hidden_ranking
from shadowattn.reporting.rows import SpreadRow

_RANKING, _WAITING = AHEAD_STAGES


@dataclass(frozen=True)
class HiddenRankingRow(SpreadRow):
    """A row about lists that are made ahead from layer `first_layer` on; 0: none are."""

    first_layer: int = 0
    threads: int = 0


@dataclass(frozen=True)
class HiddenRanking(Study):
    """The main method in the engine at each retention, with lists made by what enters the layer before, from each of `firsts` on.

    Losses are of the evaluation's windows, each compared with that of the same method without looking ahead, window by window.
    Times are of whole prefills of `rounds` windows, after one that does not count; the engines take turns. A ranking computes on
    one thread, beside attention on all of them: on the CPU both want the same cores, and what is hidden is not saved.
    """

    firsts: list[int] = field(default_factory=lambda: [1, 2, 4])
    rounds: int = 5
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "retention", "retentions", "method", "estimator", "allocator", "selection"),
        *("importance", "sensitivity", "calibration", "key_offset", "grid", "graphs", "device", "kernel", "dense_above"),
        *("decode", "pipeline", "scheduler", "engine", "threads"),
    )
    headline: ClassVar[tuple[str, ...]] = ("loss_increase", "times_faster", "hidden")

    def __post_init__(self):
        check_count("study.rounds", self.rounds)
        if not self.firsts or min(self.firsts) < 1:
            raise InputError(f"study.firsts: expected numbers of layers, at least 1 each, got {self.firsts or 'none'}")

    def check(self, lab: Lab) -> None:
        refuse_look_ahead(lab, "use study.firsts")
        check_engine(lab)
        if max(self.firsts) >= lab.shape.layers:
            raise InputError(f"study.firsts: expected less than the model's {lab.shape.layers} layers, got {max(self.firsts)}")
        if min(lab.retentions) >= 1:
            raise InputError(f"retentions: expected one below 1, where lists leave keys out, got {lab.retentions}")
        check_ranks_early(lab, "study.firsts")
        lab.heldout(windows=self.rounds + 1)

    def measure(self, lab: Lab) -> list[HiddenRankingRow]:
        units, windows, retentions = lab.units("cells"), lab.heldout(), [at for at in lab.retentions if at < 1]
        say(f"hidden ranking: {len(retentions) * (1 + len(self.firsts))} engines, {len(windows)} windows, {self.rounds} rounds")
        rows = []
        for at in bar(retentions, "retentions"):
            method = attachment(lab, lab.main, lab.offline.profile(lab.main.allocator, at)).method(lab)
            engines = {first: build_engine(lab, method, look_ahead=first or None) for first in (0, *self.firsts)}
            losses = {
                first: units.get(f"loss {first}@{at:.15g}", partial(_losses, engine, windows))
                for first, engine in engines.items()
            }
            times = units.get(f"times@{at:.15g}", partial(_times, engines, lab.heldout(windows=self.rounds + 1)))
            row = replace(method_row(lab, lab.row(HiddenRankingRow), lab.main, at), chunk_rows=lab.of("engine").chunk_tokens)
            for first in engines:
                cell = replace(row, first_layer=first)
                rows += _loss_rows(replace(cell, n=windows.numel() - len(windows), unit="nat"), losses[first], losses[0])
                timing = replace(cell, path_kind="timing", n=self.rounds, threads=torch.get_num_threads())
                rows += _time_rows(timing, times[str(first)], times["0"])
        return rows

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"hidden_ranking": draw_hidden_ranking(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """A line for each first layer, columns for each retention."""
        retentions = sorted(rows.retention.unique())
        heads = [f"{what} at {at:g}" for at in retentions for what in ("loss above its own lists, nat", "times faster", "hidden")]
        table = Table("lists ahead from layer", *heads, title=title, title_justify="left")
        cells = rows.set_index(["first_layer", "retention", "metric"]).value.sort_index()
        for first in sorted(rows.first_layer.unique()):
            line = []
            for at in retentions:
                of = cells[first, at]
                line += [f"{of.loss_increase:+.4f} ± {of.loss_increase_error:.4f}", f"{of.times_faster:.2f}"]
                line += [f"{of.hidden:.0%}" if first else ""]
            table.add_row(str(first or "none"), *line)
        return table


def _losses(engine: Engine, windows: Tensor) -> list[float]:
    return losses_of(engine.prefill_chunks, windows).tolist()


def _times(engines: dict[int, Engine], windows: Tensor) -> dict[str, list[dict[str, float]]]:
    """Of each engine the seconds of each window but the first: `whole`, and by stage."""
    taken = {str(first): [] for first in engines}
    for index, window in enumerate(windows.tolist()):
        for first, engine in engines.items():
            stages, cache, began = {}, engine.cache(), time.perf_counter()
            for start in range(0, len(window), engine.chunk_tokens):
                engine.forward(cache, window[start : start + engine.chunk_tokens], stages=stages)
            stages["whole"] = time.perf_counter() - began
            if index:  # the first warms up
                taken[str(first)].append(stages)
    return taken


def _loss_rows(row: HiddenRankingRow, losses: list[float], base: list[float]) -> list[HiddenRankingRow]:
    increase, error = float(np.mean(losses) - np.mean(base)), paired_error(losses, base)
    return [
        replace(row, metric="loss_increase", value=increase, low=increase, high=increase),
        replace(row, metric="loss_increase_error", value=error, low=error, high=error, n=len(losses)),
    ]


def _time_rows(row: HiddenRankingRow, taken: list[dict[str, float]], base: list[dict[str, float]]) -> list[HiddenRankingRow]:
    seconds, others = ([one["whole"] for one in of] for of in (taken, base))
    rows = [_spread(replace(row, metric="prefill", unit="s"), seconds)]
    rows.append(_spread(replace(row, metric="times_faster"), np.divide(others, seconds)))
    if row.first_layer:
        rows.append(_spread(replace(row, metric="ranking", unit="s"), [one[_RANKING] for one in taken]))
        rows.append(_spread(replace(row, metric="waiting", unit="s"), [one[_WAITING] for one in taken]))
        rows.append(_spread(replace(row, metric="hidden"), [1 - one[_WAITING] / one[_RANKING] for one in taken]))
    return rows


def _spread(row: HiddenRankingRow, values: list[float] | np.ndarray) -> HiddenRankingRow:
    low, median, high = (float(x) for x in np.percentile(values, (25, 50, 75)))
    return replace(row, value=median, low=low, high=high)
