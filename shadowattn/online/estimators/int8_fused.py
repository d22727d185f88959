"""INT8 without a graph: native products of quantised Q with packed K, and the selection from them in the same pass.

The same integers as the graphs' (`int8`), except midway between two steps, so the same keys; on a CPU that is also the NPU's
stand-in it saves the scores their way to memory and back. K is quantised and packed once, as it is appended.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.exclusive import Exclusive
from shadowattn.graphs.quantize import absmax_scales
from shadowattn.kernels import native, ops
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, Lists, ScaleGrid, Selection

_LEAST_KEYS = 256  # capacity that packed keys start with


@dataclass
class PackedKeys:
    """K of one layer as unsigned bytes in the native layout, growing by appending. One scale a key/value head, fixed."""

    scales: Tensor  # float32 [G]
    packed: Tensor  # uint8 [G, capacity / 16, D / 4, 16, 4]
    length: int = 0
    fingerprint: Tensor | None = None  # of the keys that are packed

    @classmethod
    def empty(cls, scales: Tensor, head_dim: int) -> "PackedKeys":
        return cls(scales, torch.zeros(len(scales), _LEAST_KEYS // 16, head_dim // 4, 16, 4, dtype=torch.uint8))

    def append(self, k: Tensor) -> None:
        """Packs the rows of k [G, K, D] that are new, those from `length` on."""
        capacity = self.packed.shape[1] * 16
        if k.shape[1] > capacity:
            capacity = -(-max(k.shape[1], capacity + capacity // 2) // 32) * 32
            grown = self.packed.new_zeros(self.packed.shape[0], capacity // 16, *self.packed.shape[2:])
            grown[:, : self.packed.shape[1]] = self.packed
            self.packed = grown
        new = k[:, self.length :]
        ops.pack(new, self.scales, self.packed, self.length)
        added = native.fingerprint(new, self.length)
        self.fingerprint = added if self.fingerprint is None else self.fingerprint + added
        self.length = k.shape[1]

    def crop(self, k: Tensor) -> None:
        """Forgets what comes after k [G, K, D], as a cropped cache does."""
        self.length, self.fingerprint = k.shape[1], native.fingerprint(k, 0)

    def begin(self, k: Tensor, scales: Tensor) -> bool:
        """Whether k [G, K, D] begins with the keys that are packed: other sequences may have come in between.

        All of their bits are asked. The last row would not do: in the first layer it depends on its token and position alone.
        """
        if self.fingerprint is None or self.length > k.shape[1] or not self.scales.equal(scales):
            return False
        return native.fingerprint(k[:, : self.length], 0).equal(self.fingerprint)


@dataclass
class Int8Fused:
    """`grid`: scales are the nearest of each head's measured ones, as with a bank; else `q_scales` [H] and `k_scales` [G]."""

    grid: ScaleGrid | None = None
    q_scales: Tensor | None = None
    k_scales: Tensor | None = None
    scores_are_finite: ClassVar[bool] = True  # products of integers
    repacked: int = field(default=0, init=False)  # times that K was packed from its first key: new prompts and new scales
    exclusive: Exclusive = field(default_factory=Exclusive, init=False, repr=False, compare=False)
    _packed: dict[int, PackedKeys] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        if self.grid is None and (self.q_scales is None or self.k_scales is None):
            raise InputError(
                "estimator=int8_fused: expected a grid, or scales of Q and of K, got neither; use Int8Fused.of(q, k) or "
                "Int8Fused(grid=profile.scales)"
            )
        if self.grid is not None and self.grid.pattern != "product":
            raise InputError(
                f"estimator=int8_fused: quantises K once for all its query heads and so needs grid.pattern=product, got "
                f"{self.grid.pattern}; use estimator=int8"
            )

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> "Int8Fused":
        """Absmax scales of q [H, Q, D] and k [G, K, D]."""
        return cls(q_scales=absmax_scales(q), k_scales=absmax_scales(k))

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor, heads: Heads | None = None) -> Tensor:
        """The integer products, exact in float32."""
        heads = heads or Heads.all(q.shape[0], k.shape[0])
        with self.exclusive.use():
            keys = self.prepare(k, layer=layer)
            return ops.estimate(q, self._q_scales(q, heads), keys.packed, keys.length, heads.kv, positions + 1, "rows", 1)

    def prepare(self, k: Tensor, *, layer: int) -> PackedKeys:
        """k [G, K, D] packed: what is new of it where the layer's packed keys are its beginning, else all of it."""
        scales = self.k_scales if self.grid is None else _nearest(self.grid.k_scales, absmax_scales(k))
        with self.exclusive.use():
            keys = self._packed.get(layer)
            if keys is None or not keys.begin(k, scales):
                keys = self._packed[layer] = PackedKeys.empty(scales, k.shape[2])
                self.repacked += 1
            if keys.length < k.shape[1]:
                keys.append(k)
            return keys

    def units(self, q: Tensor, k: Tensor, *, layer: int, heads: Heads) -> Tensor:
        """As `Scaled.units`: a step of the integer product."""
        return self._q_scales(q, heads) * self.prepare(k, layer=layer).scales[heads.kv]

    def choose(
        self, q: Tensor, prepared: PackedKeys, rule: Rule, lists: Lists, *, positions: Tensor, heads: Heads, scale: float
    ) -> Selection:
        """Products, pooling and selection, tile by tile. Raises `InputError` where a sum over a block could exceed int32."""
        if rule.pooling == "sum" and min(rule.query_block, q.shape[1]) * q.shape[2] * 127**2 >= 2**31:
            raise InputError(
                f"block_score: sums over {rule.query_block} rows of {q.shape[2]} dimensions do not fit int8_fused's 32 bits; "
                "use smaller blocks or estimator=int8"
            )
        scored, at = rule.scored(q, positions)
        q_scales = self._q_scales(scored, heads)
        exponents = None
        if rule.pooling == "probability":
            exponents = q_scales * prepared.scales[heads.kv] * (scale * math.log2(math.e))
        indices = ops.estimate_select(
            scored, q_scales, prepared.packed, prepared.length, heads.kv, at + 1, rule.pooling, rule.query_block,
            lists.offered, lists.appended, lists.starts, lists.size, lists.sinks, lists.recent, lists.self_first, exponents,
        )  # fmt: skip
        return Selection(indices, lists.starts, positions, rule.query_block)

    def _q_scales(self, q: Tensor, heads: Heads) -> Tensor:
        return _nearest(self.grid.q_scales, absmax_scales(q)) if self.q_scales is None else self.q_scales[heads.ids]


def _nearest(scales: tuple[float, ...], measured: Tensor) -> Tensor:
    """The nearest scale to each measured one, ties to the first; pairs of a grid are nearest where both parts are."""
    steps = torch.tensor(scales, dtype=torch.float64)
    within = measured.double().clamp(max=steps.max())  # beyond the largest that one is nearest, though distances round alike
    return steps[(steps - within[:, None]).abs().argmin(1)].float()
