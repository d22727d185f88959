"""Fig. 10, simulated: one layer's attention on a phone, five methods, four models, three lengths; what is published beside."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.progress import bar
from experiments.studies.simulated import Simulated, SimulatedRow
from shadowattn.errors import InputError
from shadowattn.online.simulation.device import LAYERS, Device
from shadowattn.online.simulation.methods import METHODS
from shadowattn.reporting.figures.fig10 import draw as draw_fig10
from shadowattn.reporting.paper import FIG_10


@dataclass(frozen=True)
class Fig10(Simulated):
    """Prompts of `lengths` tokens."""

    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096])
    headline: ClassVar[tuple[str, ...]] = ("mean_speedup", "largest_speedup")

    def __post_init__(self):
        super().__post_init__()
        if not self.lengths or min(self.lengths) < 1:
            raise InputError(f"study.lengths: expected at least one number of tokens, got {self.lengths}")

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"fig10": draw_fig10(rows)}

    def simulate(self, device: Device, row: SimulatedRow) -> list[SimulatedRow]:
        rows, speedups, lossy = [], [], []
        for model, layer in bar(list(LAYERS.items()), "simulate"):
            for tokens in self.lengths:
                latency_row = replace(row, model=model, context_tokens=tokens, heads=layer.heads, metric="latency")
                took = {
                    name: self.cost(device, layer, method, tokens, row.retention).total_us / 1e3
                    for name, method in METHODS.items()
                }
                rows += [replace(latency_row, method=name, value=value) for name, value in took.items()]
                speedups.append(took["C/G-Full"] / took["ours"])
                lossy += [took[name] / took["ours"] for name in ("C/G-Sparse", "C/G-Block-Sparse", "NPU-Full")]
        summary = {
            "mean_speedup": float(np.mean(speedups)),
            "largest_speedup": max(speedups),
            "largest_speedup_over_lossy": max(lossy),
        }
        summary_row = replace(row, model="all", method="ours", unit="1")
        counts = dict.fromkeys(summary, len(speedups)) | {"largest_speedup_over_lossy": len(lossy)}
        published = FIG_10 if self.is_papers(device, row.retention) else {}
        for metric, value in summary.items():
            # The mean is what the core's speed was fitted to: nothing is tested by it.
            flag = "fitted to this value" if published and metric == "mean_speedup" else ""
            paper = published.get(metric, math.nan)
            rows.append(replace(summary_row, metric=metric, value=value, published=paper, flag=flag, n=counts[metric]))
        return rows
