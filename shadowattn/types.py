"""What passes between the stages, and the names of all axes.

Axes, in every docstring of the project:

    L layer   H query head   G key/value head (H is a multiple of G)   Q query row   K key position
    D head dimension   B block of query rows that share one index list   S slot of an index list

Query row i stands at absolute position p(i) and sees the keys 0 … p(i); `visible` is p(i) + 1.
`retention` is the kept fraction of the visible keys, in (0, 1].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.artifacts import content_hash
from shadowattn.errors import InputError


@dataclass(frozen=True)
class Heads:
    """The query heads that a tensor [H, …] holds: all of a layer's, or some."""

    ids: Tensor  # int64 [H], their numbers in the layer
    kv: Tensor  # int64 [H], the key/value head that each of them reads, ascending

    def __post_init__(self):
        groups = self.kv.tolist()
        if self.ids.shape != self.kv.shape or groups != sorted(groups):
            raise InputError(f"heads: expected a key/value head for each, in ascending order, got {groups}")

    @classmethod
    def all(cls, heads: int, groups: int, device: torch.device | None = None) -> "Heads":
        """Every head of a layer: query head h reads key head h // (H / G)."""
        ids = torch.arange(heads, device=device)
        return cls(ids, ids // (heads // groups))

    def __getitem__(self, which: slice | Tensor) -> "Heads":
        return Heads(self.ids[which], self.kv[which])

    def __len__(self) -> int:
        return len(self.ids)

    def grouped(self) -> list[tuple[int, slice]]:
        """Each key/value head and the heads that read it, neighbours as they are."""
        groups, counts = self.kv.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0).tolist()
        return [(int(g), slice(end - n, end)) for g, n, end in zip(groups, counts.tolist(), ends, strict=True)]


@dataclass(frozen=True)
class Lists:
    """Which keys each list may rank, and which it must contain, before scores exist.

    List b ranks the keys 0 … candidates[b] − 1. Within its budget the first `sinks` of them come first, then the last `recent`
    of them, the nearest first, then the others by score; with `self_first` the very last, the row's own key, comes before
    the sinks. `tail[b]` keys follow, whatever their scores: the own keys of a block of rows. `indptr` int64 [H·B + 1]:
    list (h, b) fills the places indptr[h·B + b] … indptr[h·B + b + 1] − 1.
    """

    candidates: Tensor  # int64 [B]
    tail: Tensor  # int64 [B]
    indptr: Tensor
    positions: Tensor  # int64 [Q], as in Selection
    query_block: int
    sinks: int = 0
    recent: int = 0
    self_first: bool = False

    def __getitem__(self, heads: slice) -> "Lists":
        """The lists of some neighbouring heads."""
        first, last, _ = heads.indices((len(self.indptr) - 1) // len(self.candidates))
        indptr = self.indptr[first * len(self.candidates) : last * len(self.candidates) + 1]
        return replace(self, indptr=indptr - indptr[0])

    @property
    def size(self) -> int:
        """Length of all lists together."""
        return int(self.indptr[-1])

    def kept(self) -> int:
        """How many (head, row, key) pairs are attended to, whichever keys are chosen: all rows of a block see what it ranks."""
        if self.query_block == 1:
            return self.size
        counts = self.indptr.diff().view(-1, len(self.candidates))
        block = torch.arange(len(self.positions), device=self.positions.device) // self.query_block
        own = (self.positions + 1 - self.candidates[block]).clamp(min=0).minimum(self.tail[block])
        return int((counts - self.tail).sum(0)[block].sum() + len(counts) * own.sum())


@dataclass(frozen=True)
class Selection:
    """Which keys each query row attends to: indices, never masks.

    Rows b·query_block … (b+1)·query_block − 1 of the chunk share list b. Of its list a row uses the keys at or before its
    own position; a list always holds at least one key that every row of its block sees. Lists lie one after another, since
    heads of different retention have lists of different lengths.
    """

    indices: Tensor  # int32 [n]; list (h, b) is indices[indptr[h·B + b] : indptr[h·B + b + 1]], ascending, no duplicates
    indptr: Tensor  # int64 [H·B + 1]
    positions: Tensor  # int64 [Q], absolute position of every query row, ascending
    query_block: int

    @property
    def blocks(self) -> int:
        """B, the number of lists of a head."""
        return -(-len(self.positions) // self.query_block)

    @property
    def counts(self) -> Tensor:
        """Length of each list, int64 [H, B], at least 1."""
        return self.indptr.diff().view(-1, self.blocks)

    def list_of(self, head: int, block: int) -> Tensor:
        """One list, int32 [S]."""
        start, end = self.indptr[head * self.blocks + block : head * self.blocks + block + 2].tolist()
        return self.indices[start:end]

    def kept(self) -> int:
        """Number of (head, row, key) pairs that are attended to."""
        if self.query_block == 1:
            return len(self.indices)
        rows = torch.full_like(self.positions[: self.blocks], self.query_block)
        rows[-1] = len(self.positions) - (self.blocks - 1) * self.query_block
        pairs = int((self.counts * rows).sum())
        block = torch.arange(self.blocks, device=self.indices.device).repeat(self.counts.shape[0])
        block = block.repeat_interleave(self.indptr.diff())
        late = self.indices > self.positions[block * self.query_block]  # keys that some row of the block does not see
        block, keys = block[late], self.indices[late]
        before = torch.searchsorted(self.positions, keys) - block * self.query_block
        return pairs - int(before.minimum(rows[block]).sum())

    @staticmethod
    def cat(parts: "list[Selection]") -> "Selection":
        """The lists of several groups of heads, in their order, over the same rows."""
        if len(parts) == 1:
            return parts[0]
        offsets = [0]
        for part in parts:
            offsets.append(offsets[-1] + len(part.indices))
        indptr = [part.indptr[:-1] + offset for part, offset in zip(parts, offsets, strict=False)]
        indptr.append(parts[0].indptr.new_tensor(offsets[-1:]))
        return Selection(torch.cat([p.indices for p in parts]), torch.cat(indptr), parts[0].positions, parts[0].query_block)


MOST_TILE_ROWS = 64  # a word has a bit for each row


@dataclass(frozen=True)
class UnionTiles:
    """Per-row lists as tiles of rows read them: the union of a tile's lists, and which of its rows keep each key.

    Tile b of a head has its rows b·rows … (b+1)·rows − 1. Attention is that of the per-row lists, for every row its own keys; the
    K and V of a key are read once for all rows of a tile. Between two unions there may be places that are not used.
    """

    indices: Tensor  # int32 [n]; union (h, b) is indices[starts[h·B + b] : ends[h·B + b]], ascending, no duplicates
    members: Tensor  # int64 [n]; bit r of a key's word is set where row r of the tile keeps the key
    starts: Tensor  # int64 [H·B]
    ends: Tensor  # int64 [H·B]
    positions: Tensor  # int64 [Q], as in Selection
    rows: int  # of a tile, up to 64

    @property
    def counts(self) -> Tensor:
        """Length of each union, int64 [H, B]."""
        return (self.ends - self.starts).view(-1, -(-len(self.positions) // self.rows))

    def per_row(self) -> Selection:
        """The lists that the unions are of."""
        queries, counts = len(self.positions), self.ends - self.starts
        blocks = self.counts.shape[1]
        tile = torch.arange(len(counts)).repeat_interleave(counts)
        places = torch.arange(len(tile)) + (self.ends - counts.cumsum(0))[tile]
        entry, row = ((self.members[places, None] >> torch.arange(self.rows)) & 1).nonzero().T
        lists = (tile // blocks * queries + tile % blocks * self.rows)[entry] + row
        order = lists.argsort(stable=True)
        lengths = lists.bincount(minlength=len(counts) // blocks * queries)
        indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return Selection(self.indices[places][entry[order]], indptr, self.positions, 1)


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
class EstimateCost:
    """What ranking takes for one row of one query head and one key that it sees; what rows or heads share is divided.

    `mac_bits`: multiply-accumulates times the bits of K's figures in them, and every addition and comparison of floats, a
    rotation's, a pooling's or a sum's, as a product of floats; `bytes`: of K's figures read for the score. Floats count 32
    bits. Exponentials, square roots and divisions, sorting, gathers and the selection count nothing.
    """

    mac_bits: float
    bytes: float

    @classmethod
    def of(cls, figures: float, bits: int) -> "EstimateCost":
        """So many figures of so many bits, each read once and multiplied once."""
        return cls(mac_bits=figures * bits, bytes=figures * bits / 8)

    @classmethod
    def deriving(cls, macs: float, *, keys: int) -> "EstimateCost":
        """So many float operations to derive what a row and a key bring to a score, spread over the `keys` that the row sees.

        What is derived of a key is kept with it, so that a chunk derives figures of as many keys as it has rows. It counts for
        every head that reads it.
        """
        return cls(mac_bits=32 * macs / keys, bytes=0.0)

    @classmethod
    def adding(cls, operations: float) -> "EstimateCost":
        """So many float operations for each row and key on figures that are at hand."""
        return cls(mac_bits=32 * operations, bytes=0.0)

    @classmethod
    def quantising(cls, head_dim: int, *, keys: int, offset: object | None = None) -> "EstimateCost":
        """A row and a key as integers: the largest magnitude, and a product with the scale, of every channel; where there is an
        `offset`, of keys less that."""
        return cls.deriving((4 + (offset is not None)) * head_dim, keys=keys)

    def __add__(self, other: "EstimateCost") -> "EstimateCost":
        return EstimateCost(self.mac_bits + other.mac_bits, self.bytes + other.bytes)


# What a sensitivity can be of, as `offline.sensitivity` defines them.
MEASURES = ("error", "divergence", "loss")


@dataclass(frozen=True)
class Sensitivity:
    """What it costs that one head alone keeps less: `cost[l][h][i]` at `retentions[i]`, all other heads dense.

    `retentions` ascend and end in 1, where the cost is 0. By `measure` the cost is the squared relative change of the hidden
    states that leave the head's layer (`error`), an estimated KL divergence in nat (`divergence`), or the increase of the loss in
    nat (`loss`).
    """

    retentions: tuple[float, ...]
    cost: tuple[tuple[tuple[float, ...], ...], ...]
    measure: str
    tokens: int


def _tuples(table: Any) -> Any:
    """Nested lists as nested tuples."""
    return tuple(map(_tuples, table)) if isinstance(table, list | tuple) else table


@dataclass(frozen=True)
class ChannelStatistics:
    """What the channels of Q and K, after RoPE, are like on calibration text, for estimators that look at a few of them.

    `q` [L][H][D] and `k` [L][G][D]: the mean magnitude of each channel. `axes` [L][G][D][D]: orthonormal principal axes of each
    head's keys, one a row, that of the largest variance first. `fingerprint`: of the model, as `models.fingerprint` gives it.
    Raises `InputError` on values that are not finite and on sizes that do not fit together.
    """

    q: tuple[tuple[tuple[float, ...], ...], ...]
    k: tuple[tuple[tuple[float, ...], ...], ...]
    axes: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    fingerprint: str = ""

    def __post_init__(self):
        checks.instance("channels.fingerprint", self.fingerprint, str, "leave it out where no model is known")
        for name in ("q", "k", "axes"):
            object.__setattr__(self, name, _tuples(getattr(self, name)))
        q, k, axes = self._tensors
        sizes = [list(x.shape) for x in (q, k, axes)]
        if (
            [x.dim() for x in (q, k, axes)] != [3, 3, 4]
            or sizes[2] != [*sizes[1], sizes[1][2]]
            or (sizes[0][0], sizes[0][2]) != (sizes[1][0], sizes[1][2])
            or sizes[0][1] % sizes[1][1]
        ):
            raise InputError(f"channels: expected q [L][H][D], k [L][G][D] and axes [L][G][D][D], got {sizes}; calibrate again")
        if not all(bool(x.isfinite().all()) for x in (q, k, axes)):
            raise InputError("channels: expected finite values, got NaN or infinity; calibrate again")

    @classmethod
    def read(cls, value: "ChannelStatistics") -> "ChannelStatistics":
        """What it is given. Raises `InputError` on anything else than channel statistics."""
        checks.instance("channels", value, cls, "measure them with shadowattn.offline.observe_channels")
        return value

    def of(self, layer: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """`q` [H, D] of these heads of a layer, and `k` [G, D] and `axes` [G, D, D] of all its key heads; float32, on the CPU.

        Raises `InputError` for a layer or heads that they were not measured on.
        """
        q, k, axes = self._tensors
        if not 0 <= layer < len(q) or int(heads.ids.max()) >= q.shape[1] or int(heads.kv.max()) >= k.shape[1]:
            raise InputError(
                f"channels: they are of {len(q)} layers × {q.shape[1]} heads, got layer {layer} and heads up to "
                f"{int(heads.ids.max())}; measure them on this model"
            )
        return q[layer, heads.ids.cpu()], k[layer], axes[layer]

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        try:
            return tuple(torch.tensor(x, dtype=torch.float32) for x in (self.q, self.k, self.axes))
        except (TypeError, ValueError) as error:
            raise InputError(f"channels: expected tables of numbers ({error}); calibrate again") from error

    def __repr__(self) -> str:
        return f"channel statistics of {len(self.q)} layers"


# What enters a decoder's projections; gate and up have the same input.
BLOCK_POINTS = ("qkv", "out", "mlp", "down")


@dataclass(frozen=True)
class BlockRanges:
    """The largest magnitude of every channel that enters a decoder's projections, on calibration text, one list a layer.

    `qkv` [L][E] of Q, K and V; `out` [L][H·D] of the output projection; `mlp` [L][E] of gate and up; `down` [L][F] of the down
    projection. `fingerprint`: of the model. Raises `InputError` on values that are not finite and on sizes that do not fit.
    """

    qkv: tuple[tuple[float, ...], ...]
    out: tuple[tuple[float, ...], ...]
    mlp: tuple[tuple[float, ...], ...]
    down: tuple[tuple[float, ...], ...]
    fingerprint: str = ""

    def __post_init__(self):
        checks.instance("ranges.fingerprint", self.fingerprint, str, "leave it out where no model is known")
        for point in BLOCK_POINTS:
            object.__setattr__(self, point, _tuples(getattr(self, point)))
        tables = [torch.tensor(getattr(self, point)) for point in BLOCK_POINTS]
        if any(table.dim() != 2 or len(table) != len(tables[0]) for table in tables):
            raise InputError(
                f"ranges: expected [L][channels] for each of {', '.join(BLOCK_POINTS)}, got {[list(x.shape) for x in tables]}; "
                "calibrate again"
            )
        if not all(bool(table.isfinite().all()) for table in tables):
            raise InputError("ranges: expected finite values, got NaN or infinity; calibrate again")

    def of(self, layer: int) -> dict[str, Tensor]:
        """Those of one layer by point, float32 [channels]."""
        return {point: torch.tensor(getattr(self, point)[layer]) for point in BLOCK_POINTS}


@dataclass(frozen=True)
class IndexerWeights:
    """What trained indexers multiply Q and K by, one indexer a layer: M indexer heads of E dimensions and one key head.

    Of the layer's queries, all heads of a row in one vector, `q` [L][M][E][H·D] makes the indexer's queries and `gate`
    [L][M][H·D + 1] their weights, the last figure a constant; of its keys `k` [L][E][G·D] makes the indexer's key. `divergence`
    [L]: what the last pass over the training rows had left of the KL divergence from dense attention, nat. `fingerprint`: of the
    model. Raises `InputError` on values that are not finite and on sizes that do not fit together.
    """

    q: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    k: tuple[tuple[tuple[float, ...], ...], ...]
    gate: tuple[tuple[tuple[float, ...], ...], ...]
    divergence: tuple[float, ...] = ()
    fingerprint: str = ""

    def __post_init__(self):
        checks.instance("indexer.fingerprint", self.fingerprint, str, "leave it out where no model is known")
        for name in ("q", "k", "gate", "divergence"):
            object.__setattr__(self, name, _tuples(getattr(self, name)))
        q, k, gate = self._tensors
        sizes = [list(x.shape) for x in (q, k, gate)]
        fits = [x.dim() for x in (q, k, gate)] == [4, 3, 3] and q.shape[:2] == gate.shape[:2] and len(q) == len(k)
        if not fits or (q.shape[2], gate.shape[2]) != (k.shape[1], q.shape[3] + 1):
            raise InputError(
                f"indexer: expected q [L][M][E][H·D], k [L][E][G·D] and gate [L][M][H·D + 1], got {sizes}; train it again"
            )
        if not all(bool(x.isfinite().all()) for x in (q, k, gate)):
            raise InputError("indexer: expected finite values, got NaN or infinity; train it again")

    @classmethod
    def read(cls, value: "IndexerWeights") -> "IndexerWeights":
        """What it is given. Raises `InputError` on anything else than an indexer's weights."""
        checks.instance("indexer", value, cls, "train them with shadowattn.offline.train_indexer")
        return value

    @property
    def heads(self) -> int:
        """M."""
        return len(self.q[0])

    @property
    def dims(self) -> int:
        """E."""
        return len(self.k[0])

    def of(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`q`, `k` and `gate` of a layer with queries [H, Q, D] and keys [G, K, D]; float32, where these are.

        Raises `InputError` for a layer, or heads, that it was not trained on.
        """
        tensors = self._tensors
        sizes = [tensors[0].shape[3], tensors[1].shape[2]]
        got = [q.shape[0] * q.shape[2], k.shape[0] * k.shape[2]]
        if not 0 <= layer < len(tensors[0]) or got != sizes:
            raise InputError(
                f"indexer: it is of {len(tensors[0])} layers with {sizes[0]} figures of queries and {sizes[1]} of keys, got "
                f"layer {layer} with {got[0]} and {got[1]}; train it on this model"
            )
        return tuple(x[layer].to(q.device) for x in tensors)

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        try:
            return tuple(torch.tensor(x, dtype=torch.float32) for x in (self.q, self.k, self.gate))
        except (TypeError, ValueError) as error:
            raise InputError(f"indexer: expected tables of numbers ({error}); train it again") from error

    def __repr__(self) -> str:
        return f"indexers of {len(self.q)} layers, {self.heads} heads of {self.dims} dimensions"


@dataclass(frozen=True)
class FirstLookLosses:
    """What a first look by the mean query of a block costs each head, on calibration text.

    `lost` [L][H]: the attention mass of a flat estimate's lists less that of the lists after the look, the mean over rows.
    `candidates`, `block_rows`: the look's settings, as those of the estimator. `fingerprint`: of the model. Raises `InputError`
    on values that are not finite and on what is no table.
    """

    lost: tuple[tuple[float, ...], ...]
    candidates: float
    block_rows: int
    fingerprint: str = ""

    def __post_init__(self):
        checks.instance("first_look.fingerprint", self.fingerprint, str, "leave it out where no model is known")
        object.__setattr__(self, "lost", _tuples(self.lost))
        if self._table.dim() != 2 or not self._table.numel():
            raise InputError(f"first_look: expected lost [L][H], got {list(self._table.shape)}; measure it again")
        if not bool(self._table.isfinite().all()):
            raise InputError("first_look: expected finite values, got NaN or infinity; measure it again")

    @classmethod
    def read(cls, value: "FirstLookLosses") -> "FirstLookLosses":
        """What it is given. Raises `InputError` on anything else than first looks' losses."""
        checks.instance("first_look", value, cls, "measure them with shadowattn.offline.observe_first_look")
        return value

    def spared(self, layer: int, heads: Heads, share: float) -> Tensor:
        """A mask of these heads of a layer, bool [H], on the CPU: the `share` of all the model's heads that lose most.

        A share is rounded up to whole heads. Of heads with equal losses the one of the lower layer, then of the lower number, is
        spared first. Raises `InputError` for a layer or heads that it was not measured on.
        """
        ids = heads.ids.tolist()
        if not 0 <= layer < len(self.lost) or max(ids) >= len(self.lost[layer]):
            raise InputError(
                f"first_look: it is of {len(self.lost)} layers × {len(self.lost[0])} heads, got layer {layer} and heads up "
                f"to {max(ids)}; measure it on this model"
            )
        ranks, spared = self._ranks[layer], math.ceil(share * (len(self.lost) * len(self.lost[0])))
        return torch.tensor([ranks[head] < spared for head in ids], device="cpu")

    @cached_property
    def _table(self) -> Tensor:
        try:
            return torch.tensor(self.lost, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"first_look: expected a table of numbers ({error}); measure it again") from error

    @cached_property
    def _ranks(self) -> list[list[int]]:
        """Each head's place [L][H], 0 for the one that loses most; no tensor, whose operations take longer than a look-up."""
        order = self._table.flatten().sort(descending=True, stable=True).indices
        return torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(self._table.shape).tolist()

    def __repr__(self) -> str:
        return f"first looks' losses of {len(self.lost)} layers"


# How `offline.key_offsets` chooses a key offset; `none`: K is quantised as it is.
KEY_OFFSETS = ("none", "mean", "midrange")


@dataclass(frozen=True)
class KeyOffset:
    """A vector for each layer and key/value head that is subtracted from K before the estimate quantises K.

    q·(k − c) = q·k − q·c: all scores of a query row change by the same constant, and no ranking of its keys does. The INT8 scale
    of K shrinks where keys have a large common component, as biases of the projections make it. Attention itself uses K.

    `values` [L][G][D], of keys after RoPE; `how` names the calibration (`KEY_OFFSETS`, or `given`). Raises `InputError` on values
    that are not finite in float32, and where layers differ in G or heads in D.
    """

    values: tuple[tuple[tuple[float, ...], ...], ...]
    how: str = "given"

    def __post_init__(self):
        layers = [checks.sequence("key_offset", layer) for layer in checks.sequence("key_offset", self.values)]
        table = tuple(tuple(tuple(checks.numbers_of("key_offset", head)) for head in layer) for layer in layers)
        object.__setattr__(self, "values", table)
        sizes = {(len(layer), len(head)) for layer in table for head in layer}
        if len(sizes) != 1 or 0 in next(iter(sizes)) or len({len(layer) for layer in table}) != 1:
            raise InputError(
                f"key_offset: expected [L][G][D], every layer of as many heads and dimensions, got (heads, dimensions) "
                f"{sorted(sizes)} in {len(table)} layers; calibrate again"
            )
        if not bool(self._tensors.isfinite().all()):
            raise InputError("key_offset: expected values that float32 holds, got larger ones; calibrate again")
        checks.instance("key_offset.how", self.how, str, "name the calibration as text")

    @classmethod
    def read(cls, value: "KeyOffset | Mapping[str, Any] | None") -> "KeyOffset | None":
        """A key offset from JSON, or what is one already; None stays None. Raises `InputError` on anything else."""
        value = cls(**value) if isinstance(value, Mapping) else value
        if value is not None:
            checks.instance("key_offset", value, cls, "measure one with shadowattn.offline.observe_key_offset")
        return value

    def of(self, layer: int) -> Tensor:
        """The vectors of a layer, float32 [G, D]. Raises `InputError` for a layer that it was not calibrated on."""
        if not 0 <= layer < len(self.values):
            raise InputError(
                f"key_offset: it has {len(self.values)} layers, got layer {layer}; calibrate a key offset on this model"
            )
        return self._tensors[layer]

    @cached_property
    def digest(self) -> str:
        """12 hexadecimal digits that tell offsets apart."""
        return content_hash(self.values)

    @cached_property
    def _tensors(self) -> Tensor:
        return torch.tensor(self.values, dtype=torch.float32)

    def __hash__(self) -> int:
        return hash(self.digest)  # of thousands of values, once

    def __str__(self) -> str:
        return f"key offset {self.how} {self.digest}"

    __repr__ = __str__


PATTERNS = ("product", "cross", "corners")


@dataclass(frozen=True)
class ScaleGrid:
    """The static INT8 scales that graphs are built for, in pairs of a Q scale and a K scale.

    A scale is the real value of one integer step, absmax / 127. The defaults of paper and artifact give
    3 × 3 pairs: the mean of the observed scales times 0.5, 1 and 2, for Q and for K (section 3.3). `pattern` says which pairs:
    `product`, all; `cross`, those with Q or K at its middle scale; `corners`, the middle pair and those of outermost scales.
    The paper's five buckets are one of the last two; it does not say which.

    With a `key_offset` the scales of K are those of k − offset, and only such keys may be quantised by them.
    """

    q_scales: tuple[float, ...]
    k_scales: tuple[float, ...]
    pattern: str = "product"
    key_offset: KeyOffset | None = None

    def __post_init__(self):
        object.__setattr__(self, "key_offset", KeyOffset.read(self.key_offset))
        checks.one_of("grid.pattern", self.pattern, PATTERNS)
        for name in ("q_scales", "k_scales"):
            object.__setattr__(self, name, tuple(checks.numbers_of(name, getattr(self, name))))
        if self.pattern != "product" and not len(self.q_scales) % 2 == len(self.k_scales) % 2 == 1:
            raise InputError(
                f"grid.pattern: {self.pattern} needs a middle scale, got {len(self.q_scales)} × {len(self.k_scales)}"
            )
        for name, scales in (("q_scales", self.q_scales), ("k_scales", self.k_scales)):
            if not scales or any(not 1e-15 <= scale <= 1e15 for scale in scales):  # else products leave float32
                raise InputError(f"{name}: expected scales of 1e-15 … 1e15, got {list(scales)}; calibrate again")

    @property
    def pairs(self) -> tuple[tuple[float, float], ...]:
        """All (q_scale, k_scale) buckets, Q-major."""
        middle, ends = [], []
        for scales in (self.q_scales, self.k_scales):
            middle.append(scales[len(scales) // 2])
            ends.append((scales[0], scales[-1]))

        def kept(q: float, k: float) -> bool:
            if self.pattern == "cross":
                return q == middle[0] or k == middle[1]
            return self.pattern == "product" or [q, k] == middle or (q in ends[0] and k in ends[1])

        return tuple((q, k) for q in self.q_scales for k in self.k_scales if kept(q, k))


@dataclass(frozen=True)
class Requant:
    """How integer products become INT8 scores: score = clamp(round(product × multiplier), −128, 127).

    `target_requant`: `value` is the multiplier, the same for every bucket, so a bucket's output scale is q · k / value.
    `fixed_output`: `value` is one output scale, and a bucket's multiplier is q · k / value. The first is the default of the
    authors' code; the paper does not say.
    """

    mode: str
    value: float

    def __post_init__(self):
        if self.mode not in ("target_requant", "fixed_output"):
            raise InputError(f"requant: expected target_requant or fixed_output, got {checks.shown(self.mode)}")
        if not checks.number("requant", self.value) > 0:
            raise InputError(f"requant: expected a positive finite value, got {self.value}; calibrate again")

    def multiplier(self, q_scale: float, k_scale: float) -> float:
        """INT8 steps of the score for one step of the integer product."""
        return self.value if self.mode == "target_requant" else q_scale * k_scale / self.value

    def output_scale(self, q_scale: float, k_scale: float) -> float:
        """The real value of one INT8 step of the score."""
        return q_scale * k_scale / self.value if self.mode == "target_requant" else self.value


def retention_table(retention: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Retentions [L][H] as tuples. Raises `InputError` where they are no numbers, or the table is ragged or empty."""
    table = tuple(tuple(checks.numbers_of("retention", layer)) for layer in checks.sequence("retention", retention))
    if len({len(layer) for layer in table}) != 1 or not table[0]:
        raise InputError("retention: expected one value per layer and head, got a ragged or empty table")
    return table


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
        checks.instance("scales", self.scales, ScaleGrid, "make one with shadowattn.offline.scale_grid(observations)")
        object.__setattr__(self, "head_dim", checks.integer("head_dim", self.head_dim, least=1))
        for name in ("fingerprint", "model", "allocator"):
            checks.instance(name, getattr(self, name), str, "give it as text")
        object.__setattr__(self, "retention", retention_table(self.retention))
        values = [value for layer in self.retention for value in layer]
        if any(not 0 < value <= 1 for value in values):
            raise InputError(
                f"retention: expected values in (0, 1], got {min(values)} … {max(values)}; allocate the profile again"
            )
        offset = self.scales.key_offset
        if offset is not None:
            sizes, expected = (len(offset.values), len(offset.values[0][0])), (len(self.retention), self.head_dim)
            if sizes != expected:
                raise InputError(
                    f"key_offset: expected one of {expected[0]} layers and {expected[1]} dimensions, as the profile, got "
                    f"{sizes[0]} and {sizes[1]}; calibrate a key offset on this model"
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
