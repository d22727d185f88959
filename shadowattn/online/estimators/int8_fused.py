"""INT8 without a graph: native products of quantised Q with packed K, and the selection from them in the same pass.

The same integers as the graphs' (`int8_graph`), and so the same keys, except where a value lies midway between two steps. It is
what `int8` is on a machine without an NPU: no score is written to memory and read back. K is quantised and packed once, as keys
are appended. Where the keys are not in the CPU's memory, torch computes the same integers, and selection follows the estimate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.symmetric_int8 import absmax_scales, in_parts, products, quantise, shifted, step_scales
from shadowattn.kernels import Kernels, ops
from shadowattn.online.chunk import Chunk, largest_key_scales
from shadowattn.online.estimators.base import Estimator, check_scales, key_offset_of
from shadowattn.online.selection import Rule
from shadowattn.types import EstimateCost, KeyOffset, Lists, RetentionProfile, ScaleGrid, Selection

_LEAST_KEYS = 256  # capacity that packed keys start with
# Rows of a list for which one task pays: with fewer `attend` reads each row's keys on its own (csrc/attend.h), of more than 64
# it makes several tasks.
_SHARED_ROWS = range(4, 65)


class PackedKeys:
    """K of one layer as unsigned bytes in the native layout, growing with the keys. One scale a key/value head, fixed.

    With a `key_offset` the bytes are those of k − offset, of the given `layer`. `twice`: also key by key, from which the native
    kernel packs the keys that a first look lets through.
    """

    def __init__(
        self, scales: Tensor, head_dim: int, key_offset: KeyOffset | None = None, layer: int = 0, *, twice: bool = False
    ):
        self.scales = scales  # float32 [G]
        self._offset, self._layer = key_offset, layer
        self.packed = torch.zeros(len(scales), _LEAST_KEYS // 16, head_dim // 4, 16, 4, dtype=torch.uint8)
        self.by_key = torch.zeros(len(scales), _LEAST_KEYS, head_dim, dtype=torch.uint8) if twice else None  # [G, K, D]
        self.length = 0

    def extend(self, k: Tensor) -> None:
        """Packs the rows of k [G, K, D] from `length` on."""
        if k.shape[1] == self.length:
            return
        capacity = self.packed.shape[1] * 16
        if k.shape[1] > capacity:
            self._grow(-(-max(k.shape[1], capacity + capacity // 2) // 32) * 32)
        for part in in_parts(k[:, self.length :]):
            ops.pack(shifted(part, self._offset, self._layer), self.scales, self.packed, self.length, self.by_key)
            self.length += part.shape[1]

    def _grow(self, capacity: int) -> None:
        self.packed = longer(self.packed, capacity // 16)
        self.by_key = None if self.by_key is None else longer(self.by_key, capacity)

    def crop(self, length: int) -> None:
        self.length = length

    def products(self, chunk: Chunk, q_scales: Tensor) -> Tensor:
        """Integer products of the chunk's rows with all keys, float32 [H, Q, K]."""
        visible = chunk.positions + 1
        return ops.estimate(chunk.q, q_scales, self.packed, self.length, chunk.heads.kv, visible, "rows", 1)


def longer(x: Tensor, length: int) -> Tensor:
    """x [G, …] with zeros behind it on its second axis."""
    grown = x.new_zeros(x.shape[0], length, *x.shape[2:])
    grown[:, : x.shape[1]] = x
    return grown


class TorchKeys:
    """The torch twin of `PackedKeys`, on any device: K as int8 [G, K, D]."""

    def __init__(self, scales: Tensor, head_dim: int, key_offset: KeyOffset | None = None, layer: int = 0):
        self.scales = scales  # float32 [G]
        self._offset, self._layer = key_offset, layer
        self.integers = scales.new_empty((len(scales), 0, head_dim), dtype=torch.int8)
        self.length = 0

    def extend(self, k: Tensor) -> None:
        """Quantises the rows of k [G, K, D] from `length` on."""
        if k.shape[1] == self.length:
            return
        new = quantise(shifted(k[:, self.length :], self._offset, self._layer), self.scales)
        self.integers = torch.cat([self.integers[:, : self.length], new], 1)
        self.length = k.shape[1]

    def crop(self, length: int) -> None:
        self.length = length

    def products(self, chunk: Chunk, q_scales: Tensor) -> Tensor:
        """As those of `PackedKeys`."""
        q8, k8 = quantise(chunk.q, q_scales), self.integers[:, : self.length]
        return torch.cat([products(q8[part], k8[group]) for group, part in chunk.heads.grouped()])


@dataclass
class Int8Fused(Estimator):
    """Scales of each head: those of `q_scales` [H] and `k_scales` [G]; of `grid`, the nearest to the measured ones, as with a
    bank; without them the measured ones themselves, of Q over the chunk's rows, of K over all keys so far. Those of K may be
    given alone.

    `key_offset` is subtracted from K before it is quantised; scales of K are then those of such keys. A grid brings its own.
    """

    grid: ScaleGrid | None = None
    q_scales: Tensor | None = None
    k_scales: Tensor | None = None
    key_offset: KeyOffset | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"grid"})
    selects: ClassVar[bool] = True
    lists_are_sound: ClassVar[bool] = True  # the kernel's, or `Kernels.select`'s
    scores_are_finite: ClassVar[bool] = True  # products of integers
    is_native: ClassVar[bool] = True
    is_papers: ClassVar[bool] = True
    clipped: int = field(default=0, init=False)  # as for `Int8Graph`
    repacked: int = field(default=0, init=False)  # times that K was packed from its first key: new prompts and new scales

    def __post_init__(self):
        alone = self.k_scales is None and self.q_scales is not None
        if alone or (self.grid is not None and self.k_scales is not None):
            kind = type(self).__name__
            raise InputError(
                f"{kind}: expected scales of Q and of K, of K alone, a grid, or none of them; use {kind}.of(q, k), "
                f"{kind}(grid=profile.scales) or {kind}()"
            )
        if self.k_scales is not None:
            check_scales(k_scales=self.k_scales, **({} if self.q_scales is None else {"q_scales": self.q_scales}))
        _ = self._offset  # one beside a grid is refused now
        if self.grid is not None and self.grid.pattern != "product":
            raise InputError(
                f"{type(self).__name__}: quantises K once for all its query heads and so needs grid.pattern=product, "
                f"got {self.grid.pattern}; use estimator=int8_graph"
            )

    @classmethod
    def of(cls, q: Tensor, k: Tensor, *, key_offset: KeyOffset | None = None, layer: int = 0) -> "Int8Fused":
        """Absmax scales of q [H, Q, D] and k [G, K, D], less the key offset of a layer if any."""
        k_scales = absmax_scales(shifted(k, key_offset, layer))
        return cls(q_scales=absmax_scales(q), k_scales=k_scales, key_offset=key_offset)

    @property
    def goes_by(self) -> str:
        """The chunk, whose measured scales serve it, or pick those that do."""
        fixed = self.q_scales is not None or (self.grid is not None and len(self.grid.pairs) == 1)
        return self.sees if fixed else "chunk"

    def check_profile(self, profile: RetentionProfile) -> None:
        if self.grid is None or self.grid == profile.scales:
            return
        offsets = [scales.key_offset or "no key offset" for scales in (self.grid, profile.scales)]
        differ = f", which has {offsets[1]} where the grid has {offsets[0]}" if offsets[0] != offsets[1] else ""
        raise InputError(
            f"estimator: its grid is not that of the profile's scales{differ}; make it with Int8Fused(profile.scales)"
        )

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(head_dim, 8) + EstimateCost.quantising(head_dim, keys=keys, offset=self._offset)

    def scores(self, chunk: Chunk) -> Tensor:
        """The integer products, exact in float32."""
        self._count_clipped(chunk)
        return self._keys(chunk).products(chunk, self._q_scales(chunk))

    def units(self, chunk: Chunk) -> Tensor:
        """A step of the integer product."""
        return self._q_scales(chunk) * self._keys(chunk).scales[chunk.heads.kv]

    def prepare(self, chunk: Chunk) -> None:
        self._keys(chunk)

    def select(self, chunk: Chunk, rule: Rule, lists: Lists, kernels: Kernels) -> Selection:
        """Products, pooling and selection, tile by tile. Raises `InputError` where a sum over a block could exceed int32."""
        if chunk.q.device.type != "cpu":
            return super().select(chunk, rule, lists, kernels)
        keys, scored, q_scales, exponents = self._ranking(chunk, rule)
        indices = ops.estimate_select(
            scored.q, q_scales, keys.packed, keys.length, chunk.heads.kv, scored.positions + 1, rule.pooling, rule.query_block,
            lists.candidates, lists.tail, lists.indptr, lists.size, lists.sinks, lists.recent, lists.self_first, exponents,
        )  # fmt: skip
        return Selection(indices, lists.indptr, chunk.positions, rule.query_block)

    def attend_shared(self, chunk: Chunk, lists: Lists, kernels: Kernels) -> Tensor:
        """In one call, where the kernels are native and all keys compete. Scores are rounded otherwise than torch's, in the last
        places.
        """
        if kernels.name != "native" or int(lists.candidates[0]) != chunk.keys:
            return super().attend_shared(chunk, lists, kernels)
        self._count_clipped(chunk)
        ends = lists.indptr.tolist()
        return ops.attend_shared(
            chunk.q, chunk.k, chunk.v, self._kernel_scales(chunk), self._keys(chunk).packed,
            [end - start for start, end in pairwise(ends)], lists.sinks, lists.recent, lists.self_first, chunk.scale,
        )[0]  # fmt: skip

    def _ranking(self, chunk: Chunk, rule: Rule) -> tuple[PackedKeys, Chunk, Tensor, Tensor | None]:
        """What native lists are ranked by: keys, the rows with a score, their scales, and what makes probabilities of them."""
        _, rows, dim = chunk.q.shape
        if rule.pooling == "sum" and min(rule.query_block, rows) * dim * 127**2 >= 2**31:
            raise InputError(
                f"block_score: sums over {rule.query_block} rows of {dim} dimensions do not fit int8_fused's 32 bits; "
                "use smaller blocks or estimator=int8_graph"
            )
        keys, scored = self._keys(chunk), rule.scored(chunk)
        self._count_clipped(scored)
        q_scales = self._q_scales(scored)
        exponents = None
        if rule.pooling == "probability":
            exponents = q_scales * keys.scales[chunk.heads.kv] * (chunk.scale * math.log2(math.e))
        return keys, scored, q_scales, exponents

    def attends(self, rule: Rule, kernels: Kernels) -> bool:
        return kernels.name == "native" and (rule.query_block == 1 or rule.query_block in _SHARED_ROWS)

    def attend(self, chunk: Chunk, rule: Rule, lists: Callable[[], Lists], *, listed: bool) -> tuple[Tensor, Selection | int]:
        """Some rows or blocks of a head a task, from their products to their output. Raises `InputError` as `select` does."""
        if rule.query_block == 1:
            self._count_clipped(chunk)
            return self._attend_chosen(chunk, rule, lists() if listed else None, self._keys(chunk))
        keys, scored, q_scales, exponents = self._ranking(chunk, rule)
        to = lists()
        out, indices = ops.attend_chosen_blocks(
            chunk.q, chunk.k, chunk.v, scored.q, q_scales, keys.packed, chunk.heads.kv, chunk.positions,
            scored.positions + 1, rule.pooling, rule.query_block, to.candidates, to.tail, to.indptr, to.size,
            to.sinks, to.recent, to.self_first, chunk.scale, listed, exponents,
        )  # fmt: skip
        return out, Selection(indices, to.indptr, chunk.positions, rule.query_block) if listed else to.kept()

    def _keys(self, chunk: Chunk, *, twice: bool = False) -> PackedKeys | TorchKeys:
        """The chunk's keys as integers, `PackedKeys` perhaps `twice`. What is new of them is rounded, or all keys, where their
        scales have changed or they are not held twice yet.
        """
        kind = PackedKeys if chunk.k.device.type == "cpu" else TorchKeys
        scaled = f"for {self.grid}" if self.k_scales is None else f"by {self.k_scales.tolist()}"
        name = f"{kind.__name__} packed {scaled}, {self._offset}"
        keys = chunk.cache.held(name)
        kept = keys is not None and not (twice and keys.by_key is None)
        if kept and keys.length == chunk.keys:
            return keys
        scales = self.k_scales
        if scales is None:
            scales = largest_key_scales(chunk, self._offset)
            scales = scales if self.grid is None else _nearest(self.grid.k_scales, scales).float()
        if keys is not None and not (kept and (keys.scales is scales or keys.scales.equal(scales))):
            chunk.cache.forget(name)
            keys = None
        self.repacked += keys is None
        factory = partial(kind, scales, chunk.k.shape[2], self._offset, chunk.layer, **({"twice": True} if twice else {}))
        return chunk.cache.derived(name, factory, chunk.k)

    def packed(self, chunk: Chunk, *, twice: bool = False) -> PackedKeys | TorchKeys:
        """The chunk's keys as integers, for measuring; in the native layout on the CPU, and `twice` as `PackedKeys` has it."""
        return self._keys(chunk, twice=twice)

    @property
    def _offset(self) -> KeyOffset | None:
        return key_offset_of(self.grid, self.key_offset)

    def _q_scales(self, chunk: Chunk) -> Tensor:
        if self.q_scales is not None:
            return self.q_scales[chunk.heads.ids]
        measured = _scales_of(chunk)
        return measured if self.grid is None else _nearest(self.grid.q_scales, measured).float()

    def _kernel_scales(self, chunk: Chunk) -> Tensor | None:
        """Those of Q for a kernel that measures them where it is given none."""
        return None if self.q_scales is None and self.grid is None else self._q_scales(chunk)

    def _attend_chosen(
        self, chunk: Chunk, rule: Rule, lists: Lists | None, keys: PackedKeys, first_look: tuple = ()
    ) -> tuple[Tensor, Selection | int]:
        """`attend` of single rows by the native kernel, which finds their budgets itself, and writes lists where there are any;
        `first_look` is what `ops.attend_chosen` takes for one.
        """
        out, indices, kept = ops.attend_chosen(
            chunk.q, chunk.k, chunk.v, self._kernel_scales(chunk), keys.packed, chunk.heads.kv, chunk.positions, chunk.retention,
            rule.min_budget, rule.sinks, rule.recent, rule.recent > 0, chunk.scale, lists.size if lists else None, *first_look,
        )  # fmt: skip
        return out, Selection(indices, lists.indptr, chunk.positions, 1) if lists else int(kept)

    def _count_clipped(self, chunk: Chunk) -> None:
        """Heads of which a largest magnitude, of Q or of their keys, is beyond the grid's scale that serves them."""
        if self.grid is None:
            return
        q, k = _scales_of(chunk), largest_key_scales(chunk, self._offset)
        beyond = (k.double() > _nearest(self.grid.k_scales, k))[chunk.heads.kv]
        clipped = int((beyond | (q.double() > _nearest(self.grid.q_scales, q))).sum())
        self.clipped += clipped  # added in one step: two layers may be at work


def measured_scales(q: Tensor) -> Tensor:
    """Absmax scales of q [H, Q, D], float32 [H]; in the CPU's memory by a kernel."""
    by_kernel = q.is_cpu and q.dtype in (torch.float32, torch.bfloat16) and q.numel()
    return step_scales(ops.largest(q.detach())) if by_kernel else absmax_scales(q)


def _scales_of(chunk: Chunk) -> Tensor:
    return chunk.once("absmax scales of q", lambda: measured_scales(chunk.q))


def _nearest(scales: tuple[float, ...], measured: Tensor) -> Tensor:
    """The nearest scale to each measured one, float64, ties to the first; pairs of a grid are nearest where both parts are."""
    steps = torch.tensor(scales, dtype=torch.float64, device=measured.device)
    within = measured.double().clamp(max=steps.max())  # beyond the largest that one is nearest, though distances round alike
    return steps[(steps - within[:, None]).abs().argmin(1)]
