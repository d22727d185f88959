"""absmax / 127, as the estimator measures online (section 3.3)."""

from dataclasses import dataclass

from torch import Tensor

from shadowattn.graphs.symmetric_int8 import absmax_scales


@dataclass(frozen=True)
class Absmax:
    def scales(self, x: Tensor) -> Tensor:
        return absmax_scales(x)
