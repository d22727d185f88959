"""Shared lists without the block's own keys: what the lost neighbourhood costs."""

from dataclasses import replace
from typing import ClassVar

import torch

from shadowattn.budget import keep_counts
from shadowattn.kernels import Kernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.selection import Rule
from shadowattn.types import Lists, Selection


class WithoutOwnKeys(Int8Fused):
    """`int8_fused` whose shared lists rank the keys that the block's first row sees, and hold no later one.

    Rows after a block's first attend to nothing of their own block but that row's key. Lists are as long as those of single rows
    are in the mean, but hold no more than the first row sees: in the first blocks of a prompt the density is lower.
    """

    lists_are_sound: ClassVar[bool] = True  # the kernel's, for other lists than those that are called for

    def select(self, chunk: Chunk, rule: Rule, lists: Lists, kernels: Kernels) -> Selection:
        if rule.query_block > 1:
            lists = _without_own_keys(chunk, rule, lists)
        return super().select(chunk, rule, lists, kernels)


def _without_own_keys(chunk: Chunk, rule: Rule, lists: Lists) -> Lists:
    block, rows = rule.query_block, len(chunk.positions)
    candidates = lists.candidates + 1  # the keys before the block, and its first row's own
    budgets = keep_counts(chunk.retention, chunk.positions + 1, rule.min_budget)
    budgets = torch.nn.functional.pad(budgets, (0, -rows % block))
    counts = (rows - torch.arange(0, rows, block, device=budgets.device)).clamp(max=block)
    lengths = (-(-budgets.unflatten(1, (-1, block)).sum(2) // counts)).minimum(candidates)
    indptr = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    return replace(lists, candidates=candidates, tail=torch.zeros_like(lists.tail), indptr=indptr)
