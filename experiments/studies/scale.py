"""Attention of prompts of 4 thousand to a million tokens, and of 4 to 64 heads, simulated: where the estimate limits."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure

from experiments.progress import bar
from experiments.refusals import check_count
from experiments.studies.simulated import Simulated, SimulatedRow
from shadowattn.errors import InputError
from shadowattn.online.simulation.device import LAYERS, Device, Layer
from shadowattn.online.simulation.methods import known_methods, pooled
from shadowattn.reporting.figures.scale import draw as draw_scale


@dataclass(frozen=True)
class Scale(Simulated):
    """Time of one layer, and the shares of it in which the device and the core work.

    Qwen2-1.5B's on prompts of `tokens` tokens; layers of `heads` heads of dimension `head_dim` on `heads_tokens` tokens.
    """

    tokens: list[int] = field(default_factory=lambda: [4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576])
    heads: list[int] = field(default_factory=lambda: [4, 8, 16, 32, 64])
    head_dim: int = 128
    heads_tokens: int = 32768
    headline: ClassVar[tuple[str, ...]] = ("latency", "estimate_share")

    def __post_init__(self):
        super().__post_init__()
        for name in ("tokens", "heads"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise InputError(f"study.{name}: expected at least one number above 0, got {getattr(self, name)}")
        check_count("study.head_dim", self.head_dim)
        check_count("study.heads_tokens", self.heads_tokens)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"study_scale": draw_scale(rows)}

    def simulate(self, device: Device, row: SimulatedRow) -> list[SimulatedRow]:
        """Methods in floating point are left out where nothing is known of the device's."""
        methods = known_methods(device) | {"ours, 32-row blocks": pooled}
        cells = [(LAYERS["Qwen2-1.5B"], tokens, "context") for tokens in self.tokens]
        cells += [(Layer(heads, heads, self.head_dim), self.heads_tokens, "heads") for heads in self.heads]
        rows = []
        for layer, tokens, against in bar(cells, "simulate"):
            for name, method in methods.items():
                cost = self.cost(device, layer, method, tokens, row.retention)
                method_row = replace(
                    row, model="Qwen2-1.5B" if against == "context" else f"D {self.head_dim}", method=name, data=against
                )
                method_row = replace(method_row, context_tokens=tokens, heads=layer.heads)
                rows.append(replace(method_row, metric="latency", value=cost.total_us / 1e3))
                rows.append(replace(method_row, metric="estimate_share", value=cost.estimate_us / cost.total_us, unit="1"))
                rows.append(replace(method_row, metric="core_share", value=cost.core_us / cost.total_us, unit="1"))
        return rows
