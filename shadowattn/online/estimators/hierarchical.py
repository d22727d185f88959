"""A cheap first look at every key by signs, then INT8 products with those that it lets through. The definition is ours."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.kernels import Kernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.per_token import PerToken
from shadowattn.online.estimators.sign1 import Sign1
from shadowattn.online.selection import Rule
from shadowattn.types import EstimateCost, KeyOffset, Lists, Selection


@dataclass(frozen=True)
class Hierarchical(Estimator):
    """Of `candidates` times as many keys as the budget, the best by rotated 1-bit keys (`sign1`), a row keeps the best by INT8.

    Integers have a scale for every row and every key (`per_token`), so that a row's ranking goes by the row alone. Sinks and the
    recent window of the rule are among the candidates. `key_offset` is a calibrated vector subtracted from K before both looks.
    Rows have lists of their own: no block shares one.
    """

    candidates: float = 5.0
    key_offset: KeyOffset | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"key_offset"})
    lists_are_sound: ClassVar[bool] = True  # `Kernels.select`'s
    first: Sign1 = field(init=False, repr=False)
    second: PerToken = field(init=False, repr=False)

    def __post_init__(self):
        _check_candidates(self.candidates)
        offset = KeyOffset.read(self.key_offset)
        for name, value in (("key_offset", offset), ("first", Sign1(key_offset=offset)), ("second", PerToken(8, offset))):
            object.__setattr__(self, name, value)

    @classmethod
    def check_settings(cls, head_dim: int, kv_heads: int, /, *, candidates: float = 1.0, **others: Any) -> None:
        _check_candidates(candidates)

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        """The first look's, which is at every key; the second adds INT8 products with `candidates` · retention of the keys."""
        return self.first.cost(head_dim, rows, keys)

    def scores(self, chunk: Chunk) -> Tensor:
        """Those of the second look, at every key."""
        return self.second.scores(chunk)

    def units(self, chunk: Chunk) -> Tensor:
        return self.second.units(chunk)

    def select(self, chunk: Chunk, rule: Rule, lists: Lists, kernels: Kernels) -> Selection:
        if rule.query_block != 1:
            raise InputError(
                f"hierarchical: looks twice for single rows, got query_block={rule.query_block}; use query_block=1 "
                "(selection=per_row) or estimator=int8_fused"
            )
        wide = rule.lists((chunk.retention * self.candidates).clamp(max=1.0), chunk.positions)
        through = kernels.select(self.first.scores(chunk), wide)
        members = _members(through, len(chunk.heads), chunk.keys)
        scores = self.second.scores(chunk).float()  # of INT8, one less than the least may not exist
        return kernels.select(torch.where(members, scores, scores.amin() - 1), lists)


def _members(lists: Selection, heads: int, keys: int) -> Tensor:
    """Which keys stand in lists of single rows, bool [H, Q, K]."""
    lengths = lists.indptr.diff()
    members = torch.zeros(len(lengths), keys, dtype=torch.bool, device=lengths.device)
    members[torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), lists.indices.long()] = True
    return members.view(heads, -1, keys)


def _check_candidates(value: float) -> None:
    if checks.number("candidates", value) < 1:
        raise InputError(f"candidates: expected 1 or more times the budget, got {value}")
