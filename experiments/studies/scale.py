"""Attention of prompts of 4 thousand to a million tokens, and of 4 to 64 heads, simulated: where the estimate limits."""

from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.figure import Figure

from experiments.progress import bar
from experiments.studies.simulated import Simulated, SimulatedRow
from shadowattn.online.simulation.device import LAYERS, Device, Layer
from shadowattn.online.simulation.methods import known_methods, pooled
from shadowattn.reporting import simulation_figures


@dataclass(frozen=True)
class Scale(Simulated):
    """Time of one layer, and the shares of it in which the device and the core work."""

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"study_scale": simulation_figures.scale(rows)}

    def simulate(self, device: Device, row: SimulatedRow) -> list[SimulatedRow]:
        """Qwen2-1.5B's layer against context; and a layer of head dimension 128 against heads, at 32 thousand tokens.

        Methods in floating point are left out where nothing is known of the device's.
        """
        methods = known_methods(device) | {"ours, 32-row blocks": pooled}
        cells = [(LAYERS["Qwen2-1.5B"], 4096 << step, "context") for step in range(9)]
        cells += [(Layer(heads, heads, 128), 32768, "heads") for heads in (4, 8, 16, 32, 64)]
        rows = []
        for layer, tokens, against in bar(cells, "simulate"):
            for name, method in methods.items():
                cost = self.cost(device, layer, method, tokens, row.retention)
                of = replace(row, model="Qwen2-1.5B" if against == "context" else "D 128", method=name, data=against)
                of = replace(of, context_tokens=tokens, heads=layer.heads)
                rows.append(replace(of, metric="latency", value=cost.total_us / 1e3))
                rows.append(replace(of, metric="estimate_share", value=cost.estimate_us / cost.total_us, unit="1"))
                rows.append(replace(of, metric="core_share", value=cost.core_us / cost.total_us, unit="1"))
        return rows
