"""Fig. 15, simulated: a small, a middle and a prime core, ours against dense attention on that core."""

from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.figure import Figure

from experiments.progress import bar
from experiments.studies.simulated import Simulated, SimulatedRow
from shadowattn.errors import InputError
from shadowattn.online.simulation.description import load_device
from shadowattn.online.simulation.device import LAYERS, Device
from shadowattn.online.simulation.methods import METHODS
from shadowattn.reporting.figures.fig15 import draw as draw_fig15


@dataclass(frozen=True)
class Fig15(Simulated):
    """A prompt of `tokens` tokens on each core that the description knows."""

    tokens: int = 2048

    def __post_init__(self):
        super().__post_init__()
        device = load_device(self.device)
        if not device.core_speeds:
            raise InputError(f"study.device: {device.name} knows one kind of core; use snapdragon_8_gen_3")

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"fig15": draw_fig15(rows)}

    def simulate(self, device: Device, row: SimulatedRow) -> list[SimulatedRow]:
        rows = []
        for core in bar(list(device.core_speeds), "simulate"):
            for model, layer in LAYERS.items():
                for name in ("C/G-Full", "ours"):
                    cost = self.cost(device.on_core(core), layer, METHODS[name], self.tokens, row.retention)
                    layer_row = replace(row, model=model, context_tokens=self.tokens, core=core, heads=layer.heads)
                    rows.append(replace(layer_row, method=name, metric="latency", value=cost.total_us / 1e3))
        return rows
