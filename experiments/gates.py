"""The gates of the reference model: what a model must do before a study of sparse attention on it means anything."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from omegaconf import OmegaConf
from rich.table import Table

from experiments.progress import say
from experiments.reference_model.gates import Samples, heldout_loss_by_position, measure_gates
from experiments.setup import Setup
from experiments.stages import UNIFORM, Offline, make_profile
from experiments.study import Attachment, common_row, measure_cell
from shadowattn.artifacts import Units
from shadowattn.graphs.bank import GraphBank
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.random import Random
from shadowattn.reporting import figures
from shadowattn.reporting.rows import Row


@dataclass(frozen=True)
class Gate:
    """`meaning` for people; passed where the value is at least (or at most) `bar`."""

    meaning: str
    unit: str
    bar: float
    at_most: bool = False

    def passed(self, value: float) -> bool:
        return value <= self.bar if self.at_most else value >= self.bar


GATES = {
    "copy_gain": Gate("repeated random block: fall of the loss, second copy against first", "share", 0.6),
    "context_gain": Gate("held-out text: loss at positions 64-128 less loss at 1024-2048", "nat", 0.15),
    "key_value_accuracy": Gate("key-value retrieval, 40 pairs, dense, exact match", "share", 0.95),
    "needle_accuracy": Gate("needle in 2048 tokens, all depths, dense, exact match", "share", 0.95),
    "random_loss_increase": Gate("random 5 % of keys against dense, held-out text", "nat", 0.3),
    "oracle_loss_increase": Gate("exact top 20 % per row against dense, held-out text", "nat", 0.02, at_most=True),
    "importance_ratio": Gate("loss increase without the most important head, against the median head", "times", 5.0),
}


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[Row]:
    """A row for each gate, and the loss at every position of held-out windows as rows `loss_at_N`."""
    model, tokenizer = setup.loaded.model, setup.loaded.tokenizer
    units = Units(folder / "gates")
    say("gates: copying, context and retrieval with dense attention, then random and exact keys")
    dense_gates = units.get("dense_gates", lambda: _dense_gates(model, tokenizer))
    values = dict(dense_gates)
    positions = units.get("positions", lambda: heldout_loss_by_position(model, tokenizer, Samples()).tolist())
    windows = setup.heldout()
    dense = units.get("dense", lambda: measure_cell(setup, windows, None).loss)

    def increase(name: str, estimator, retention: float) -> float:
        uniform = OmegaConf.create({"_target_": UNIFORM})
        attachment = Attachment(make_profile(setup, offline, uniform, retention), estimator, setup.config.selection)
        return units.get(name, lambda: measure_cell(setup, windows, attachment).loss) - dense

    values["random_loss_increase"] = increase("random", Random(setup.config.seed), 0.05)
    values["oracle_loss_increase"] = increase("oracle", Oracle(), 0.2)
    heads = np.log(np.array(offline.importance.head_ppl)) - np.log(offline.importance.base_ppl)
    values["importance_ratio"] = float(heads.max() / np.median(heads))
    row, counts = common_row(setup, windows), averaged(Samples(), predicted=windows.numel() - len(windows), heads=heads.size)
    rows = [
        replace(
            row,
            metric=name,
            value=float(values[name]),
            unit=gate.unit,
            n=counts[name],
            flag="" if gate.passed(values[name]) else "below the bar",
        )
        for name, gate in GATES.items()
    ]
    return rows + [
        replace(row, metric=f"loss_at_{at}", value=loss, unit="nat", n=Samples().text_rows) for at, loss in enumerate(positions)
    ]


def averaged(samples: Samples, *, predicted: int, heads: int) -> dict[str, int]:
    """What each gate is a mean over: tokens predicted, windows, documents, or heads."""
    return {
        "copy_gain": samples.repeat_rows * samples.block_tokens,
        "context_gain": samples.text_rows,  # windows: neighbouring tokens of one are no independent samples
        "key_value_accuracy": samples.key_value_documents,
        "needle_accuracy": samples.needle_documents,
        "random_loss_increase": predicted,
        "oracle_loss_increase": predicted,
        "importance_ratio": heads,
    }


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """Loss by position, and head importance."""
    at = rows[rows.metric.str.startswith("loss_at_")]
    figures.loss_by_position(at.value.tolist(), folder / "loss_by_position.png")
    figures.head_importance(offline.importance, folder / "importance.png")


def table(rows: pd.DataFrame, title: str) -> Table:
    """Measured beside bar."""
    values = rows.set_index("metric").value
    printed = Table(title=title, title_justify="left")
    for heading in ("gate", "measured", "bar", "unit", ""):
        printed.add_column(heading)
    for name, gate in GATES.items():
        bar = f"{'≤' if gate.at_most else '≥'} {gate.bar:g}"
        printed.add_row(gate.meaning, f"{values[name]:.3f}", bar, gate.unit, "passed" if gate.passed(values[name]) else "FAILED")
    return printed


def _dense_gates(model, tokenizer) -> dict[str, float]:
    gates = measure_gates(model, tokenizer, Samples())
    return asdict(gates) | {"copy_gain": gates.copy_gain, "context_gain": gates.context_gain}
