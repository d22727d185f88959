"""A high percentile of the absolute values / 127: a few outliers are clipped, all others get finer steps."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.estimation import INT8_MAX


@dataclass(frozen=True)
class Percentile:
    """The share `share` of a head's values is not clipped."""

    share: float = 0.999

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise InputError(f"calibration.share: expected a value in (0, 1], got {self.share}; 1 is absmax")

    def scales(self, x: Tensor) -> Tensor:
        values = x.float().abs().flatten(1)
        rank = max(1, math.ceil(self.share * values.shape[1]))
        return values.kthvalue(rank, 1).values.clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX
