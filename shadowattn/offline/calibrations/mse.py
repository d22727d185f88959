"""The scale whose quantised values are nearest to the true ones, in the mean square."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.graphs.symmetric_int8 import absmax_scales


@dataclass(frozen=True)
class MeanSquaredError:
    """Tries `steps` scales from `least` × absmax / 127 up to all of it."""

    steps: int = 20
    least: float = 0.2

    def __post_init__(self):
        if self.steps < 1 or not 0 < self.least <= 1:
            raise InputError(f"calibration: expected steps ≥ 1 and least in (0, 1], got {self.steps} and {self.least}")

    def scales(self, x: Tensor) -> Tensor:
        x, full = x.float(), absmax_scales(x)
        best, least = full, torch.full_like(full, torch.inf)
        for share in torch.linspace(1, self.least, self.steps).tolist():
            scale = (full * share)[:, None, None]
            error = ((x / scale).round().clamp(-INT8_MAX, INT8_MAX) * scale - x).square().sum((1, 2))
            best, least = torch.where(error < least, scale[:, 0, 0], best), torch.minimum(error, least)
        return best
