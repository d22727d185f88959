"""Table 8, simulated: energy of one kernel; powers fitted on two models of the paper, the two others predicted."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.progress import bar
from experiments.refusals import check_count
from experiments.studies.simulated import PAPER_CHUNK_TOKENS, PAPER_RETENTION, Simulated, SimulatedRow
from shadowattn.errors import InputError
from shadowattn.online.simulation.description import load_device
from shadowattn.online.simulation.device import LAYERS, Device
from shadowattn.online.simulation.methods import METHODS, prompt_cost
from shadowattn.reporting.figures.table8 import draw as draw_table8
from shadowattn.reporting.paper import TABLE_8

PAPER_TOKENS = 1024  # of the kernel whose energy the paper publishes


@dataclass(frozen=True)
class Table8(Simulated):
    """One kernel of `tokens` tokens (1024 in the paper) for each model and method.

    Powers are fitted on the energies of `fitted_models`, those of the other models predicted.
    """

    device: str = "snapdragon_8_gen_2"
    tokens: int = 1024
    fitted_models: list[str] = field(default_factory=lambda: ["PhoneLM-0.5B", "PhoneLM-1.5B"])
    papers_device: ClassVar[str] = "snapdragon_8_gen_2"
    headline: ClassVar[tuple[str, ...]] = ("energy",)

    def __post_init__(self):
        super().__post_init__()
        check_count("study.tokens", self.tokens)
        unknown = [name for name in self.fitted_models if name not in LAYERS]
        if unknown or not self.fitted_models:
            raise InputError(f"study.fitted_models: expected some of {', '.join(LAYERS)}, got {', '.join(unknown) or 'none'}")

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"table8": draw_table8(rows)}

    def simulate(self, device: Device, row: SimulatedRow) -> list[SimulatedRow]:
        """Energy = core power × core time + NPU power × NPU time, at the powers of the paper's phone.

        How often the paper's kernel ran is unknown, so the powers are no watts; only ratios mean anything.
        """
        papers, is_papers = load_device(self.papers_device), self.is_papers(device, row.retention)
        powers, rows = self._fitted_powers(papers), []
        for model, layer in bar(list(LAYERS.items()), "simulate"):
            for name, method in METHODS.items():
                cost = self.cost(device, layer, method, self.tokens, row.retention)
                energy_row = replace(
                    row,
                    model=model,
                    method=name,
                    context_tokens=self.tokens,
                    unit="J",
                    heads=layer.heads,
                    metric="energy",
                    energy_source="model",
                )
                energy_row = replace(energy_row, value=float(powers @ [cost.core_us, cost.estimate_us]))
                if is_papers and self.tokens == PAPER_TOKENS:
                    energy_row = replace(
                        energy_row,
                        published=TABLE_8[model][name],
                        flag="fitted to this value" if model in self.fitted_models else "",
                    )
                elif device != papers:
                    energy_row = replace(energy_row, flag=f"at the powers of {papers.name}")
                rows.append(energy_row)
        return rows

    def _fitted_powers(self, papers: Device) -> np.ndarray:
        """(core, NPU) powers in joules a microsecond: relative least squares of published energies over all methods.

        The published kernel is one of PAPER_TOKENS tokens, whatever this study simulates.
        """
        how = {"tokens": PAPER_TOKENS, "chunk_tokens": PAPER_CHUNK_TOKENS, "retention": PAPER_RETENTION}
        models = self.fitted_models
        costs = [prompt_cost(papers, LAYERS[model], method, **how) for model in models for method in METHODS.values()]
        joules = np.array([TABLE_8[model][name] for model in models for name in METHODS])
        times = np.array([[cost.core_us, cost.estimate_us] for cost in costs])
        return np.linalg.lstsq(times / joules[:, None], np.ones(len(joules)), rcond=None)[0]
