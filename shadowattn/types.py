"""What passes between the stages, and the names of all axes.

Axes, in every docstring of the project:

    L layer   H query head   G key/value head (H is a multiple of G)   Q query row   K key position
    D head dimension   B block of query rows that share one index list   S slot of an index list

Query row i stands at absolute position p(i) and sees the keys 0 … p(i); `visible` is p(i) + 1.
`retention` is the kept fraction of the visible keys, in (0, 1].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.errors import InputError


@dataclass(frozen=True)
class Selection:
    """Which keys each query row attends to: indices, never masks.

    Rows b·query_block … (b+1)·query_block − 1 of the chunk share list b. Of its list a row uses the keys at or before its
    own position; a list always holds at least one key that every row of its block sees.
    """

    indices: Tensor  # int64 [H, B, S], each list ascending and without duplicates; padding past its count is 0
    counts: Tensor  # int64 [H, B], the length of each list, at least 1
    positions: Tensor  # int64 [Q], absolute position of every query row, ascending
    query_block: int

    def kept(self) -> int:
        """Number of (head, row, key) pairs that are attended to."""
        _, _, slots = self.indices.shape
        valid = torch.arange(slots) < self.counts[..., None]
        if self.query_block == 1:
            return int(valid.sum())
        kept = 0
        for row, position in enumerate(self.positions.tolist()):
            block = row // self.query_block
            kept += int((valid[:, block] & (self.indices[:, block] <= position)).sum())
        return kept


@dataclass(frozen=True)
class Importance:
    """What ablations measured (section 3.2 of the paper): perplexities on the same text.

    `head_ppl[l][h]` with head h of layer l ablated, `layer_ppl[l]` with layer l bypassed, `base_ppl` with nothing changed.
    """

    head_ppl: tuple[tuple[float, ...], ...]
    layer_ppl: tuple[float, ...]
    base_ppl: float
    ablation: str
    tokens: int


@dataclass(frozen=True)
class AblationLosses:
    """Loss in nat of every calibration window under every ablation: what `Importance` is a mean of.

    A unit that a race has settled holds the first of the windows only.
    """

    base: tuple[float, ...]  # [W], nothing changed
    layers: tuple[tuple[float, ...], ...]  # [L][≤ W], layer bypassed
    heads: tuple[tuple[tuple[float, ...], ...], ...]  # [L][H][≤ W], head ablated
    ablation: str
    window_tokens: int

    @property
    def window_forwards(self) -> int:
        """How many (ablation, window) pairs were measured."""
        return sum(map(len, self.layers)) + sum(len(head) for layer in self.heads for head in layer)


@dataclass(frozen=True)
class Sensitivity:
    """What it costs that one head alone keeps less: `cost[l][h][i]` at `retentions[i]`, all other heads dense.

    `retentions` ascend and end in 1, where the cost is 0. The cost is an increase of the loss in nat (`measure` is `loss`), or
    the squared relative error of what the attention adds to the residual stream (`error`).
    """

    retentions: tuple[float, ...]
    cost: tuple[tuple[tuple[float, ...], ...], ...]
    measure: str
    tokens: int


@dataclass(frozen=True)
class ScaleGrid:
    """The static INT8 scales that graphs are built for: every pair of a Q scale and a K scale.

    A scale is the real value of one integer step, absmax / 127. The defaults of paper and artifact give
    3 × 3 pairs: the mean of the observed scales times 0.5, 1 and 2, for Q and for K (section 3.3).
    """

    q_scales: tuple[float, ...]
    k_scales: tuple[float, ...]

    def __post_init__(self):
        for name, scales in (("q_scales", self.q_scales), ("k_scales", self.k_scales)):
            if not scales or any(not 0 < scale < float("inf") for scale in scales):
                raise InputError(f"{name}: expected positive finite scales, got {list(scales)}; calibrate again")

    @property
    def pairs(self) -> tuple[tuple[float, float], ...]:
        """All (q_scale, k_scale) buckets, Q-major."""
        return tuple((q, k) for q in self.q_scales for k in self.k_scales)


@dataclass(frozen=True)
class RetentionProfile:
    """The offline stage's result: how much each head keeps, and the scales to build graphs for.

    It belongs to one model: `fingerprint` is `shadowattn.models.fingerprint(model)`.
    """

    retention: tuple[tuple[float, ...], ...]  # [L][H]
    scales: ScaleGrid
    head_dim: int
    fingerprint: str
    model: str
    allocator: str

    def __post_init__(self):
        values = [value for layer in self.retention for value in layer]
        if not values or len({len(layer) for layer in self.retention}) != 1:
            raise InputError("retention: expected one value per layer and head, got a ragged or empty table")
        if any(not 0 < value <= 1 for value in values):
            raise InputError(
                f"retention: expected values in (0, 1], got {min(values)} … {max(values)}; allocate the profile again"
            )

    @property
    def mean_retention(self) -> float:
        """Mean over all heads of all layers."""
        values = [value for layer in self.retention for value in layer]
        return sum(values) / len(values)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers all of whose heads keep every key."""
        return tuple(index for index, layer in enumerate(self.retention) if min(layer) == 1)

    @property
    def sparse_mean_retention(self) -> float:
        """Mean over the heads of the other layers, which is what a sparse kernel sees; 1 where every layer is dense."""
        values = [value for index, layer in enumerate(self.retention) if index not in self.dense_layers for value in layer]
        return sum(values) / len(values) if values else 1.0
