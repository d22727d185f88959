"""INT8 without a graph: native products of quantised Q with packed K, and the selection from them in the same pass.

The same integers as the graphs' (`int8`), so the same keys; on a CPU that is also the NPU's stand-in it saves the scores
their way to memory and back. K is quantised and packed once, as it is appended.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowattn.kernels import ops
from shadowattn.online.estimators.int8 import absmax_scales
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, Lists, ScaleGrid, Selection

_LEAST_KEYS = 256  # capacity that packed keys start with


@dataclass
class PackedKeys:
    """K of one layer as unsigned bytes in the native layout, growing by appending. One scale a key/value head, fixed."""

    scales: Tensor  # float32 [G]
    packed: Tensor  # uint8 [G, capacity / 16, D / 4, 16, 4]
    length: int = 0
    last: Tensor | None = None  # the last appended row of K, by which a continuation is known

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
        ops.pack(k[:, self.length :], self.scales, self.packed, self.length)
        self.length, self.last = k.shape[1], k[:, -1].clone()

    def continued_by(self, k: Tensor, first_row: int, scales: Tensor) -> bool:
        """Whether k [G, K, D] holds the packed keys and new ones, for a chunk whose first row is at `first_row`."""
        return (
            first_row >= self.length > 0
            and k.shape[1] >= self.length
            and self.last is not None
            and self.last.equal(k[:, self.length - 1])
            and self.scales.equal(scales)
        )


@dataclass
class Int8Fused:
    """`grid`: scales are the nearest of each head's measured ones, as with a bank; else `q_scales` [H] and `k_scales` [G]."""

    grid: ScaleGrid | None = None
    q_scales: Tensor | None = None
    k_scales: Tensor | None = None
    repacked: int = field(default=0, init=False)  # times that K was packed from its first key: new prompts and new scales
    _packed: dict[int, PackedKeys] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> "Int8Fused":
        """Absmax scales of q [H, Q, D] and k [G, K, D]."""
        return cls(q_scales=absmax_scales(q), k_scales=absmax_scales(k))

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor, heads: Heads | None = None) -> Tensor:
        """The integer products, exact in float32."""
        heads = heads or Heads.all(q.shape[0], k.shape[0])
        q_scales, keys = self._prepare(q, k, layer, positions, heads)
        return ops.estimate(q, q_scales, keys.packed, k.shape[1], heads.kv, positions + 1, "rows", 1)

    def choose(self, q: Tensor, k: Tensor, rule: Rule, lists: Lists, *, layer: int, positions: Tensor, heads: Heads) -> Selection:
        scored, at = rule.scored(q, positions)
        q_scales, keys = self._prepare(scored, k, layer, positions, heads)
        indices = ops.estimate_select(
            scored, q_scales, keys.packed, k.shape[1], heads.kv, at + 1, rule.pooling, rule.query_block,
            lists.offered, lists.own, lists.appended, lists.starts, lists.size, lists.sinks, lists.recent,
        )  # fmt: skip
        return Selection(indices, lists.starts, positions, rule.query_block)

    def _prepare(self, q: Tensor, k: Tensor, layer: int, positions: Tensor, heads: Heads) -> tuple[Tensor, PackedKeys]:
        """Scales of q's heads, and the layer's keys, packed up to the last of k."""
        q_scales, k_scales = self._scales(q, k, heads)
        keys = self._packed.get(layer)
        same_chunk = keys is not None and keys.length == k.shape[1] and self._matches(keys, k, k_scales)
        if not same_chunk:
            if keys is None or not keys.continued_by(k, int(positions[0]), k_scales):
                keys = self._packed[layer] = PackedKeys.empty(k_scales, k.shape[2])
                self.repacked += 1
            keys.append(k)
        return q_scales, keys

    @staticmethod
    def _matches(keys: PackedKeys, k: Tensor, scales: Tensor) -> bool:
        return keys.last is not None and keys.last.equal(k[:, -1]) and keys.scales.equal(scales)

    def _scales(self, q: Tensor, k: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
        if self.grid is None:
            if self.q_scales is None or self.k_scales is None:
                raise ValueError("expected a grid or scales, got neither; use Int8Fused.of(q, k) or pass grid=profile.scales")
            return self.q_scales[heads.ids], self.k_scales
        return _nearest(self.grid.q_scales, absmax_scales(q)), _nearest(self.grid.k_scales, absmax_scales(k))


def _nearest(scales: tuple[float, ...], measured: Tensor) -> Tensor:
    """The nearest scale to each measured one, ties to the first; pairs of a grid are nearest where both parts are."""
    steps = torch.tensor(scales, dtype=torch.float64)
    return steps[(steps - measured.double()[:, None]).abs().argmin(1)].float()
