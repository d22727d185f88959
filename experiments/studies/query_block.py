"""Lists shared by a block of rows: the quality of each way to score a block at every retention, beside the time it takes.

Methods are compared at equal density, the measured share of visible keys that they attend to; where two differ by more than
1 % of it, their comparison is flagged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pandas as pd
import torch
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from rich.console import Group
from rich.table import Table

from experiments.lab import Lab, MethodSettings
from experiments.part_building import part_name
from experiments.progress import say
from experiments.refusals import check_count, check_method
from experiments.studies.quality import Pair, Quality, answer_flags, density_flags
from shadowattn.errors import InputError
from shadowattn.interleave import Timing, interleave, ratio
from shadowattn.kernels import choose
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.stages import Parts, Stages
from shadowattn.reporting import verdicts
from shadowattn.reporting.figures.query_block import draw as draw_query_block
from shadowattn.reporting.figures.sharing_loss import draw as draw_sharing_loss
from shadowattn.reporting.rows import QualityRow, Row
from shadowattn.reporting.sharing import largest_blocks
from shadowattn.reporting.style import ALL_KEYS
from shadowattn.types import Heads

_BASELINE = "leading_query"  # the block score that others of the same block are compared with
_WITHOUT_OWN = "experiments.studies.without_own_keys.WithoutOwnKeys"


@dataclass(frozen=True)
class QueryBlock(Quality):
    """The main method with per-row lists, and with every block of `query_blocks` rows scored in each of `block_scores`.

    Times are of `rows` query rows at the end of the model's context, medians of `rounds` interleaved calls. `tolerance`: what
    sharing may add to the loss of per-row lists, nat; the table says which blocks stay within it. `without_own`: block scores
    that are measured once more with lists that hold none of the block's own keys, to tell what the lost neighbourhood costs.
    """

    query_blocks: list[int] = field(default_factory=lambda: [8, 16, 32, 64])
    block_scores: list[str] = field(default_factory=lambda: ["leading_query", "pooled_query", "max", "sum", "probability"])
    rounds: int = 15
    rows: int = 512
    tolerance: float = 0.02
    without_own: list[str] = field(default_factory=list)
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "task", "seed", "retention", "retentions", "method", "full", "estimator"),
        *("allocator", "selection", "importance", "sensitivity", "calibration", "key_offset", "grid", "graphs", "device"),
        *("kernel", "dense_above", "decode", "pipeline", "scheduler", "threads"),
    )
    headline: ClassVar[tuple[str, ...]] = ("loss_increase", "accuracy", "mass_recall", "topk_overlap", "times_faster_than_dense")

    def __post_init__(self):
        if not self.query_blocks or not self.block_scores:
            raise InputError("study.query_blocks, study.block_scores: expected at least one of each beside per-row lists")
        check_count("study.rounds", self.rounds)
        check_count("study.rows", self.rows)
        if missing := sorted(set(self.without_own) - set(self.block_scores)):
            raise InputError(f"study.without_own: expected some of study.block_scores={self.block_scores}, got {missing}")
        if not self.tolerance > 0:
            raise InputError(f"study.tolerance: expected a loss in nat above 0, got {self.tolerance}")

    def check(self, lab: Lab) -> None:
        if lab.main.selection.query_block != 1:
            raise InputError(
                f"selection.query_block: expected 1, whose lists are what shared ones are compared with, got "
                f"{lab.main.selection.query_block}; set study.query_blocks instead"
            )
        if min(lab.retentions) >= 1:
            raise InputError(f"retentions: expected one below 1, where lists leave keys out, got {lab.retentions}")
        if self.without_own and lab.main.estimator_class is not Int8Fused:
            raise InputError(
                f"study.without_own: expected estimator=int8_fused, got {part_name(lab.main.estimator)}; use it, or leave the "
                "setting out"
            )
        methods = self.methods(lab)
        if methods[lab.main.name] is not lab.main:
            raise InputError(f"method: {lab.main.name!r} is the name of a block's method; call the main one something else")
        for method in methods.values():
            check_method(lab, method)
        super().check(lab)

    def methods(self, lab: Lab) -> dict[str, MethodSettings]:
        methods = {lab.main.name: lab.main}
        for block in self.query_blocks:
            for score in self.block_scores:
                shared = {"query_block": block, "block_score": score}
                name = f"{score}_{block}"
                methods[name] = replace(lab.main, name=name, selection=OmegaConf.merge(lab.main.selection, shared))
                if score in self.without_own:
                    estimator = OmegaConf.merge(lab.main.estimator, {"_target_": _WITHOUT_OWN})
                    methods[f"{name}_without_own"] = replace(methods[name], name=f"{name}_without_own", estimator=estimator)
        return methods

    def _timed(self, lab: Lab) -> dict[str, MethodSettings]:
        """Methods without those that have another estimator: all take the same time but for the lists."""
        return {name: one for name, one in self.methods(lab).items() if one.estimator == lab.main.estimator}

    def pairs(self, lab: Lab, rows: Sequence[Row]) -> dict[Pair, str]:
        """Every method that shares lists with the main one, with `leading_query` of the same block, and with its own kind without
        the block's own keys.
        """
        shared = {name: one.selection for name, one in self.methods(lab).items() if name != lab.main.name}
        timed = {name: shared[name] for name in self._timed(lab) if name in shared}
        baselines = {one.query_block: name for name, one in timed.items() if one.block_score == _BASELINE}
        pairs = [(name, lab.main.name) for name in shared]
        pairs += [
            (name, baselines[one.query_block])
            for name, one in timed.items()
            if one.block_score != _BASELINE and one.query_block in baselines
        ]
        pairs += [(name, f"{name}_without_own") for name in timed if f"{name}_without_own" in shared]
        cells = [((name, at), (rival, at)) for at in lab.retentions if at < 1 for name, rival in pairs]
        flags = density_flags(rows, cells)
        return {pair: flags.get(pair, "") for pair in cells}

    def measure(self, lab: Lab) -> list[Row]:
        """Quality of every method at every retention, then the time of each on random tensors of the model's shape.

        With the model on a GPU quality alone: the times are of the native kernels.
        """
        rows = super().measure(lab)
        if lab.gpu:
            return rows
        times = lab.units("times")
        for at in lab.retentions:
            seconds = times.get(f"{at:g}", lambda at=at: self._seconds(lab, at))
            rows += self._time_rows(lab, at, {name: Timing(tuple(durations)) for name, durations in seconds.items()})
        return rows

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        """What sharing adds to the loss, where there are several retentions; then everything at each of them."""
        retentions = sorted(rows[(rows.query_block > 1) & (rows.retention < 1)].retention.unique())
        every_key = (rows.method == "dense") | (rows.allocator == ALL_KEYS)
        drawn = {f"query_block_{at:g}": draw_query_block(rows[(rows.retention == at) | every_key]) for at in retentions}
        if len(retentions) == 1:
            return {"query_block": drawn.popitem()[1]}
        return {"sharing_loss": draw_sharing_loss(rows, self.tolerance)} | drawn

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A line a method: what it attends to, what it loses and what it saves; the largest blocks that lose little; then which
        methods differ.
        """
        metrics = [
            "density",
            "loss_increase",
            "perplexity",
            "accuracy",
            "mass_recall",
            "topk_overlap",
            "row_overlap",
            "times_faster_than_dense",
        ]
        table = Table("method", "retention", "query block", *(m.replace("_", " ") for m in metrics), title=title)
        rows = rows[rows["head"] < 0] if "head" in rows else rows
        shown = rows[(rows.method != "dense") | (rows.retention == 1)]
        for (method, at, query_block), cell in shown.groupby(["method", "retention", "query_block"], sort=False):
            values = cell.set_index("metric").value
            cells = (f"{values[m]:.4g}" if m in values.index else "" for m in metrics)
            table.add_row(method, f"{at:g}", str(query_block), *cells)
        caption = (
            f"largest block within {self.tolerance:g} nat of per-row lists: it and every smaller one, to the 95 % interval's end"
        )
        return Group(table, *answer_flags(rows), caption, self._largest(rows), *verdicts.compared(rows))

    def _largest(self, rows: pd.DataFrame) -> Table:
        """The largest block of every rule that keeps the loss of per-row lists."""
        largest = largest_blocks(rows, self.tolerance)
        title = (
            f"largest block within {self.tolerance:g} nat of per-row lists (upper end of the 95 % interval), it and all smaller"
        )
        table = Table("retention", *largest.columns, title=title, title_justify="left")
        for at, blocks in largest.iterrows():
            table.add_row(f"{at:g}", *(f"{block:.0f}" if block > 1 else "none" for block in blocks))
        return table

    def _seconds(self, lab: Lab, retention: float) -> dict[str, list[float]]:
        """Of one chunk at the end of the model's context, estimate to output; candidates take turns."""
        shape, keys = lab.shape, lab.shape.context_tokens
        rows, methods = min(self.rows, keys), self._timed(lab)
        say(f"time: {len(methods)} ways to attend from {rows} rows to {keys} keys at {retention:g}, random tensors")
        generator = torch.Generator().manual_seed(lab.seed)
        q = torch.randn(shape.heads, rows, shape.head_dim, generator=generator)
        k, v = torch.randn(2, shape.kv_heads, keys, shape.head_dim, generator=generator)
        kernels = choose(lab.kernel, head_dim=shape.head_dim, dtype=q.dtype)
        heads, scale = Heads.all(shape.heads, shape.kv_heads), shape.head_dim**-0.5
        chunk, estimator = Chunk.of(q, k, v, retention=retention, scale=scale), Int8Fused.of(q, k)
        calls = {"dense": lambda: kernels.dense(q, k, v, heads, causal_offset=keys - rows, scale=scale)}
        for name, method in methods.items():
            parts = Parts(estimator, method.rule, kernels)
            calls[name] = lambda parts=parts: Pipeline().run(Stages(chunk.rewound(), parts), keep_lists=False)
        return {name: list(timing.seconds) for name, timing in interleave(calls, rounds=self.rounds, warmup=2).items()}

    def _time_rows(self, lab: Lab, retention: float, timings: dict[str, Timing]) -> list[Row]:
        """Dense attention's retention names what it was timed beside."""
        common = replace(lab.timing_row(QualityRow), n=self.rounds, context_tokens=lab.shape.context_tokens, retention=retention)
        methods, rows = self._timed(lab), []
        for name, timing in timings.items():
            row = common
            if name in methods:
                row = replace(
                    common, method=name, estimator="int8_fused", allocator="uniform", **methods[name].selection
                )  # fmt: skip
            rows.append(replace(row, metric="chunk_time", value=timing.median_s * 1e3, unit="ms"))
            rows.append(replace(row, metric="times_faster_than_dense", value=ratio(timings["dense"], timing)))
        return rows
