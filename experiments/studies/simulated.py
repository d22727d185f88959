"""What the paper measures on phones, simulated from a device's description; published values beside, unknown ones left out."""

import math
from abc import abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import pandas as pd
from rich.table import Table

from experiments.lab import Lab
from experiments.progress import say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.online.simulation.description import load_device
from shadowattn.online.simulation.device import Device, Layer
from shadowattn.online.simulation.methods import Cost, Method, prompt_cost
from shadowattn.reporting.rows import Row

# What the paper runs: its retention and chunk.
PAPER_RETENTION = 0.2
PAPER_CHUNK_TOKENS = 128


@dataclass(frozen=True)
class SimulatedRow(Row):
    """A simulated row: of which device and core, for how many heads, and what the paper publishes (NaN: nothing)."""

    device: str = ""
    core: str = ""
    heads: int = 0
    published: float = math.nan
    energy_source: str = ""  # `model` of energies; see `shadowattn.energy`


@dataclass(frozen=True)
class Simulated(Study):
    """A study that simulates `device`, a shipped description or a .yaml file of your own; it loads no model.

    Derive a class with `simulate`; `papers_device` is the one that the paper's values are of.
    """

    device: str = "snapdragon_8_gen_3"
    chunk_tokens: int = PAPER_CHUNK_TOKENS
    needs: ClassVar[tuple[str, ...]] = ("retention",)
    papers_device: ClassVar[str] = "snapdragon_8_gen_3"
    headline: ClassVar[tuple[str, ...]] = ("latency",)

    def __post_init__(self):
        check_count("study.chunk_tokens", self.chunk_tokens)
        load_device(self.device)

    def inputs(self) -> dict[str, Any]:
        """The description by its content."""
        return {"device": asdict(load_device(self.device))}

    @abstractmethod
    def simulate(self, device: Device, row: SimulatedRow) -> list[SimulatedRow]:
        """Rows of a device, at the retention of `row`, which holds what all have in common."""

    def measure(self, lab: Lab) -> list[SimulatedRow]:
        device = load_device(self.device)
        say(f"{device.name}: {_knowledge(device)}")
        row = replace(
            lab.row(SimulatedRow), device=device.name, path_kind="timing", measured="simulated", unit="ms", n=1,
            estimate_device=device.estimate_on, retention=lab.retentions[0],
        )  # fmt: skip
        return self.simulate(device, row)

    def cost(self, device: Device, layer: Layer, method: Method, tokens: int, retention: float) -> Cost:
        """What a prompt costs in chunks of this study's length."""
        return prompt_cost(device, layer, method, tokens=tokens, chunk_tokens=self.chunk_tokens, retention=retention)

    def is_papers(self, device: Device, retention: float) -> bool:
        """Whether the paper's device is simulated as the paper runs it, so that its values may stand beside."""
        papers = device == load_device(self.papers_device)
        return papers and (retention, self.chunk_tokens) == (PAPER_RETENTION, PAPER_CHUNK_TOKENS)

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """Simulated values, published ones beside where there are any."""
        published_rows = rows[rows.published.notna()]
        if len(published_rows):
            table = Table("model", "method", "metric", "simulated", "published", "difference", "", title=f"{title} · simulated")
            for row in published_rows.itertuples():
                texts = (f"{row.value:.3g}", f"{row.published:.3g}", f"{row.value / row.published - 1:+.0%}")
                table.add_row(row.model, row.method, row.metric.replace("_", " "), *texts, row.flag)
            return table
        costs = rows[rows.metric.isin(("latency", "energy"))]
        methods = costs.method.unique()
        heading = f"{title} · simulated {' '.join([costs.unit.iloc[0], *filter(None, costs.flag.unique())])}"
        table = Table("model", "tokens", "heads", "core", *methods, title=heading)
        for (model, tokens, heads, core), cell in costs.groupby(["model", "context_tokens", "heads", "core"], sort=False):
            values = cell.set_index("method").value
            table.add_row(model, str(tokens), str(heads), core, *(f"{values[name]:.4g}" for name in methods))
        return table


def _knowledge(device: Device) -> str:
    """How much of a description is of which kind."""
    kinds = [value.kind for value in vars(device).values() if hasattr(value, "kind")]
    return ", ".join(f"{kinds.count(kind)} numbers {kind}" for kind in dict.fromkeys(kinds))
