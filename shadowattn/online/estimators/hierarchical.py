"""A first look for a block of rows by the mean of their queries; then each row ranks what it let through. The definition is ours.

Neighbouring rows of a prompt rank keys much alike, so that the best few times as many keys as the budget, by one query for all
rows of a block, hold most of what each of them would choose. A flat INT8 estimate multiplies every row with every key, and
compares as many scores. Here a block shares one row of products with every key, and its rows meet the keys let through alone.
A few heads lose most of the attention mass that is lost by it. They are known from calibration text, and let every key through.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.graphs.buckets import heads_at_once
from shadowattn.graphs.symmetric_int8 import INT8_MAX, quantise
from shadowattn.kernels import Kernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import FirstLook, check_rule
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.selection import Rule, last_of_blocks
from shadowattn.types import EstimateCost, FirstLookLosses, Lists, Selection


@dataclass
class Hierarchical(Int8Fused):
    """Of the keys that a block's mean query ranks first by INT8 products, each of its rows keeps the best by its own.

    A block is `block_rows` neighbouring rows, counted from the first row of a chunk. Its mean query is the sum of the rows'
    integers, scaled to ±127. It lets through `candidates` times as many of the keys up to the block's first row as the block's
    last row keeps. Let through anyway are the sinks, the `block_rows` keys up to the first row (or the rule's recent window, if
    that is longer) and all later keys. Scales and `key_offset` are those of `Int8Fused`, whose lists these are where every key is
    let through. That is so of the `flat_share` of the model's heads that lose most by a first look, as `first_look` has it
    measured (`Calibration.first_look`). Rows have lists of their own: no block shares one. Raises `InputError` on a `flat_share`
    without such losses, or with those of other settings.
    """

    candidates: float = 2.0
    block_rows: int = 64
    flat_share: float = 0.0
    first_look: FirstLookLosses | None = None
    needs: ClassVar[frozenset[str]] = Int8Fused.needs | {"first_look"}
    sees: ClassVar[str] = "chunk"  # a row's block, later rows of it too
    lists_are_sound: ClassVar[bool] = True  # the kernel's, or `Kernels.select`'s
    is_native: ClassVar[bool] = True
    single_rows: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        _check_settings(self.candidates, self.block_rows, self.flat_share)
        if self.first_look is None:
            if self.flat_share:
                raise InputError(
                    f"flat_share: expected first_look beside {self.flat_share:g}, which says whom it spares; measure it with "
                    "shadowattn.offline.observe_first_look"
                )
            return
        settings = FirstLookLosses.read(self.first_look).candidates, self.first_look.block_rows
        if settings != (self.candidates, self.block_rows):
            raise InputError(
                f"first_look: expected losses by candidates={self.candidates:g} and block_rows={self.block_rows}, got those by "
                f"{settings[0]:g} and {settings[1]}; measure them with these settings"
            )

    @classmethod
    def check_settings(
        cls,
        head_dim: int,
        kv_heads: int,
        /,
        *,
        candidates: float = 2.0,
        block_rows: int = 64,
        flat_share: float = 0.0,
        **others: Any,
    ) -> None:
        _check_settings(candidates, block_rows, flat_share)

    @classmethod
    def look_of(cls, settings: Mapping[str, Any]) -> FirstLook:
        return FirstLook(settings.get("candidates", cls.candidates), settings.get("block_rows", cls.block_rows))

    @property
    def made_for(self) -> str:
        return self.first_look.fingerprint if self.first_look else ""

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        """The first look's, a block's share, and products with every key for heads that are spared it; the second look adds INT8
        products with `candidates` · retention of the keys.
        """
        look = EstimateCost.of(head_dim * (self.flat_share + (1 - self.flat_share) / self.block_rows), 8)
        return look + EstimateCost.quantising(head_dim, keys=keys, offset=self._offset)

    def attends(self, rule: Rule, kernels: Kernels) -> bool:
        return rule.query_block == 1 and super().attends(rule, kernels)

    def attend(self, chunk: Chunk, rule: Rule, lists: Callable[[], Lists], *, listed: bool) -> tuple[Tensor, Selection | int]:
        """Some blocks of a head a task: first looks, choices among what they let through, attention.

        A V that is not finite makes all rows of a block NaN which let its key through, also those that do not keep it; but where
        blocks let every key through, their rows attend each for itself.
        """
        keys = self._keys(chunk, twice=True)
        self._count_clipped(chunk)
        look = (self.block_rows, self._near(rule), self.candidates, self._spared(chunk), keys.by_key)
        return self._attend_chosen(chunk, rule, lists() if listed else None, keys, look)

    def select(self, chunk: Chunk, rule: Rule, lists: Lists, kernels: Kernels) -> Selection:
        """The lists of `attend`, by scores and masks [H, Q, K] in torch: for the torch kernels, and for pipelines that take the
        stages apart.
        """
        check_rule(rule, type(self))
        heads, rows, _ = chunk.q.shape
        some = heads_at_once(rows, chunk.keys)
        parts = [slice(first, first + some) for first in range(0, heads, some)]
        return Selection.cat([self._select(chunk[part], rule, lists[part], kernels) for part in parts])

    def _select(self, chunk: Chunk, rule: Rule, lists: Lists, kernels: Kernels) -> Selection:
        """As `select`, with masks and scores of all heads of the chunk at once."""
        self._count_clipped(chunk)
        keys, q_scales = self._keys(chunk), self._q_scales(chunk)
        seen, through = lists.candidates[:: self.block_rows].contiguous(), self._through(chunk, lists)
        means = mean_queries(quantise(chunk.q, q_scales), self.block_rows).float()
        first = replace(chunk, q=means, positions=seen - 1)
        ends = torch.nn.functional.pad(through.flatten().cumsum(0), (1, 0))
        best = kernels.select(
            keys.products(first, torch.ones_like(q_scales)), Lists(seen, torch.zeros_like(seen), ends, seen - 1, query_block=1)
        )
        key = torch.arange(chunk.keys, device=chunk.q.device)
        members = _members(best, len(chunk.heads), chunk.keys) | (key < rule.sinks) | (key >= seen[:, None] - self._near(rule))
        hidden = (~members).repeat_interleave(self.block_rows, 1)[:, : chunk.q.shape[1]]
        scores = keys.products(chunk, q_scales)
        return kernels.select(scores.masked_fill_(hidden, scores.amin() - 1), lists)

    def _near(self, rule: Rule) -> int:
        """How many keys up to a block's first row are let through anyway: what the first look sees worst, and the window."""
        return max(self.block_rows, rule.recent)

    def _through(self, chunk: Chunk, lists: Lists) -> Tensor:
        """How many keys each block's mean query lets through, of those that its first row sees: int64 [H, blocks]."""
        seen = lists.candidates[:: self.block_rows]
        places = lists.indptr[:-1], lists.indptr[1:]
        starts, ends = (last_of_blocks(x.view(len(chunk.heads), -1), self.block_rows) for x in places)
        kept = ends - starts
        wanted = kept.float().mul_(self.candidates).ceil_()  # may be beyond all integers
        every = self._spared(chunk).to(wanted.device)[:, None] | (wanted >= seen)
        return torch.where(every, seen, wanted.long().maximum(kept).minimum(seen))

    def _spared(self, chunk: Chunk) -> Tensor:
        """Heads whose blocks let every key through, bool [H], in the CPU's memory."""
        if self.first_look is None:
            return torch.zeros(len(chunk.heads), dtype=torch.bool)
        return self.first_look.spared(chunk.layer, chunk.heads, self.flat_share)


def mean_queries(q8: Tensor, rows: int) -> Tensor:
    """The sum of q8 int8 [H, Q, D] over each `rows` rows, scaled to ±127 and rounded half up: int8 [H, blocks, D]."""
    padded = torch.nn.functional.pad(q8.long(), (0, 0, 0, -q8.shape[1] % rows))
    sums = padded.unflatten(1, (-1, rows)).sum(2)
    largest = sums.abs().amax(2, keepdim=True).clamp(min=1)
    return ((2 * INT8_MAX * sums + largest).div(2 * largest, rounding_mode="floor")).to(torch.int8)


def _members(lists: Selection, heads: int, keys: int) -> Tensor:
    """Which keys stand in lists of single rows, bool [H, rows, K]."""
    lengths = lists.indptr.diff()
    members = torch.zeros(len(lengths), keys, dtype=torch.bool, device=lengths.device)
    members[torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), lists.indices.long()] = True
    return members.view(heads, -1, keys)


def _check_settings(candidates: float, block_rows: int, flat_share: float) -> None:
    checks.number("flat_share", flat_share, least=0, most=1)
    if checks.number("candidates", candidates) < 1:
        raise InputError(f"candidates: expected 1 or more times the budget, got {candidates}")
    if checks.integer("block_rows", block_rows, least=8, most=64) % 8:
        raise InputError(f"block_rows: expected a multiple of 8, got {block_rows}")
