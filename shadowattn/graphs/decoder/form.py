"""In which arithmetic a decoder's blocks and its output layer run, and where the blocks' weights are."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.types import BLOCK_POINTS

PRECISIONS = ("float32", "bfloat16", "w8a8", "w8", "w4")
WEIGHTS = ("inputs", "constants")
HEADS = ("model", "int8")


@dataclass(frozen=True)
class BlockForm:
    """How every layer's blocks are compiled, and the output layer behind them.

    `precision`: `float32`; `bfloat16`, products of float32 tensors in bfloat16 on a CPU that has it; `w8a8`, INT8 weights, one
    scale a row, and INT8 activations with one calibrated scale for each layer and projection; `w8` and `w4`, weights alone, as
    NNCF compresses them (INT4 in groups of `group` channels). `weights`: `inputs`, one compiled graph serves all layers, which
    give it their weights and scales; `constants`, a graph of its own for each layer. `smooth`: how much of the size of channels
    moves from activations to weights before either is quantised (SmoothQuant, arXiv 2211.10438, its α); 0: nothing. `floats`:
    inputs of projections, of `types.BLOCK_POINTS`, that stay in float32 with their weights. `head`: the output layer's weights in
    the `model`'s dtype, multiplied by torch, or in `int8`, one scale a row, beside float32 activations.
    """

    precision: str = "float32"
    weights: str = "inputs"
    group: int = 64
    smooth: float = 0.0
    floats: tuple[str, ...] = ()
    head: str = "model"

    def __post_init__(self):
        checks.one_of("engine.precision", self.precision, PRECISIONS)
        checks.one_of("engine.weights", self.weights, WEIGHTS)
        checks.one_of("engine.head", self.head, HEADS)
        checks.integer("engine.group", self.group, least=1)
        if not 0 <= checks.number("engine.smooth", self.smooth) <= 1:
            raise InputError(f"engine.smooth: expected a share from 0 to 1, got {self.smooth}")
        if self.smooth and self.precision in ("float32", "bfloat16"):
            raise InputError(f"engine.smooth: {self.precision} quantises nothing, got {self.smooth}; set engine.precision=w8a8")
        object.__setattr__(self, "floats", tuple(checks.sequence("engine.floats", self.floats)))
        for point in self.floats:
            checks.one_of("engine.floats", point, BLOCK_POINTS)
        if self.floats and not self.rounds_activations:
            raise InputError(f"engine.floats: {self.precision} rounds no activations, got {', '.join(self.floats)}; leave it out")
        if self.precision in ("w8", "w4") and self.weights == "inputs":
            raise InputError(
                f"engine.weights: {self.precision} compresses constants, got inputs; set engine.weights=constants, or "
                "engine.precision=w8a8"
            )

    def check_channels(self, channels: Collection[int]) -> None:
        """Raises `InputError` where groups of 4-bit weights do not divide the channels that enter every projection."""
        if self.precision == "w4" and any(count % self.group for count in channels):
            raise InputError(
                f"engine.group: expected a divisor of every projection's channels ({', '.join(map(str, sorted(channels)))}), got "
                f"{self.group}; set engine.group={math.gcd(*channels, self.group)}"
            )

    @property
    def rounds_activations(self) -> bool:
        """Whether what enters a projection is quantised, and not its weights alone."""
        return self.precision == "w8a8"

    @property
    def needs_ranges(self) -> bool:
        """Whether it takes what channels are like on calibration text."""
        return self.rounds_activations or self.smooth > 0
