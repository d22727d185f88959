"""Lists shared by a block of rows: the quality of each way to score a block, beside the time it takes.

Methods are compared at equal density, the measured share of visible keys that they attend to; where two differ by more than
1 % of it, their comparison is flagged.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from rich.console import Group
from rich.table import Table

from benchmarks.interleave import interleave, ratio
from experiments import study
from experiments.comparisons import comparison_rows
from experiments.progress import say
from experiments.setup import Setup, rule_options
from experiments.stages import Offline
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank
from shadowattn.kernels import choose
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.reporting import figures, verdicts
from shadowattn.reporting.rows import Row
from shadowattn.types import Heads

Cell = tuple[str, float]  # method and retention
_ROUNDS, _ROWS = 15, 512
_BASELINE = "first_row"  # the block score that others of the same block are compared with


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[Row]:
    """Quality of every method at one retention, then the time of each on random tensors of the model's shape."""
    if len(setup.retentions) != 1:
        raise InputError(f"retentions: this study compares blocks at one retention, got {setup.retentions}")
    rows = study.measure_cells(setup, offline, bank, folder)
    losses, pairs = study.loss_rows(rows), _pairs(setup)
    flags = density_flags(rows, pairs)
    return rows + comparison_rows(losses, study.cell_losses(setup, folder), pairs, flags=flags) + _times(setup)


def _pairs(setup: Setup) -> list[tuple[Cell, Cell]]:
    """Every method that shares lists with the main one, and with `first_row` of the same block."""
    selections = {name: method.selection for name, method in setup.methods.items()}
    first_rows = {selection.query_block: name for name, selection in selections.items() if selection.block_score == _BASELINE}
    pairs = [(name, setup.config.method) for name in selections if name != setup.config.method]
    pairs += [
        (name, first_rows[selection.query_block])
        for name, selection in selections.items()
        if selection.query_block > 1 and selection.block_score != _BASELINE and selection.query_block in first_rows
    ]
    (at,) = setup.retentions
    return [((own, at), (rival, at)) for own, rival in pairs]


def density_flags(rows: Sequence[Row], pairs: Sequence[tuple[Cell, Cell]]) -> dict[tuple[Cell, Cell], str]:
    """What to say of pairs whose measured densities differ by more than 1 %, by pair; (method, retention) names a cell."""
    densities = {(row.method, row.retention): row.value for row in rows if row.metric == "sparse_density"}
    flags = {}
    for own, rival in pairs:
        excess = densities[own] / densities[rival] - 1
        if abs(excess) > figures.EQUAL_DENSITY:
            flags[own, rival] = f"density {excess:+.1%}"
    return flags


def _times(setup: Setup) -> list[Row]:
    """One chunk at the end of the model's context, estimate to output; candidates take turns."""
    shape, keys = setup.shape, setup.shape.context_tokens
    rows = min(_ROWS, keys)
    say(f"time: {len(setup.methods)} ways to attend from {rows} rows to {keys} keys, random tensors")
    generator = torch.Generator().manual_seed(setup.config.seed)
    q = torch.randn(shape.heads, rows, shape.head_dim, generator=generator)
    k, v = torch.randn(2, shape.kv_heads, keys, shape.head_dim, generator=generator)
    kernels = choose(setup.kernel, head_dim=shape.head_dim, dtype=q.dtype)
    heads, scale = Heads.all(shape.heads, shape.kv_heads), shape.head_dim**-0.5
    chunk, estimator = Chunk.of(q, k, v, retention=setup.retentions[0], scale=scale), Int8Fused.of(q, k)
    calls = {"dense": lambda: kernels.dense(q, k, v, heads, causal_offset=keys - rows, scale=scale)}
    rules = {name: Rule(**rule_options(method.selection)) for name, method in setup.methods.items()}
    for name in rules:
        parts = Parts(estimator, rules[name], kernels)
        calls[name] = lambda parts=parts: Pipeline().run(Stages(chunk.rewound(), parts), keep_lists=False)
    timings = interleave(calls, rounds=_ROUNDS, warmup=2)
    common = replace(
        study.common_row(setup, torch.zeros(0, 1)), path_kind="timing", n=_ROUNDS, context_tokens=keys, data="random tensors"
    )
    made = []
    for name, timing in timings.items():
        row = common
        if name in setup.methods:
            selection = setup.methods[name].selection
            row = replace(
                common, method=name, retention=setup.retentions[0], query_block=selection.query_block,
                block_score=selection.block_score, estimator="int8_fused", allocator="uniform",
            )  # fmt: skip
        made.append(replace(row, metric="chunk_time", value=timing.median_s * 1e3, unit="ms"))
        made.append(replace(row, metric="times_faster_than_dense", value=ratio(timings["dense"], timing)))
    return made


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """Quality and speed against the rows that share a list."""
    figures.quality_against_query_block(rows, folder / "query_block.png")


def table(rows: pd.DataFrame, title: str) -> Group:
    """A line a method: what it attends to, what it loses and what it saves; then which methods differ."""
    metrics = [
        "density",
        "loss_increase",
        "perplexity",
        "accuracy",
        "mass_recall",
        "topk_overlap",
        "times_faster_than_dense",
    ]
    made = Table("block score", "query block", *(m.replace("_", " ") for m in metrics), title=title)
    for (query_block, score), cell in rows.groupby(["query_block", "block_score"], sort=False):
        values = cell.set_index("metric").value
        made.add_row(score, str(query_block), *(f"{values[m]:.4g}" if m in values.index else "" for m in metrics))
    return Group(made, verdicts.comparisons(rows))
