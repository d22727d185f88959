"""Estimate and selection both on the device: graphs that return indices, so that no score comes back (`selection=device`).

k is static in a graph, so heads of different retention take graphs of different k; each row uses as much of its graph's answer as
its budget says, which leaves the keys that the host would have selected from the same scores, not rounded to float16.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn.budget import key_block_counts
from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank
from shadowattn.kernels import Kernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.int8_graph import Buckets, OfBank, launch
from shadowattn.online.selection import Rule
from shadowattn.types import Lists, Selection

_NOWHERE = torch.iinfo(torch.int32).max


@dataclass
class Int8Device(OfBank, Estimator):
    """Lists from a bank of graphs with `indices`. The pool of their form is (rows that share a list, keys that go together).

    With blocks of keys, a list holds the best ceil(budget / key_block) blocks, or as many as hold the least budget of a row
    (`reference.select_key_blocks`). Where rows share a list, graphs rank only the keys before the block's own keys, which are the
    list's tail.
    """

    bank: GraphBank
    needs: ClassVar[frozenset[str]] = frozenset({"bank"})
    reads_cpu_memory: ClassVar[bool] = True
    selects: ClassVar[bool] = True
    lists_are_sound: ClassVar[bool] = True  # of whole blocks of keys they are longer than those that are called for
    clipped: int = field(default=0, init=False)  # as for `Int8Graph`
    launched: int = field(default=0, init=False)

    def scores(self, chunk: Chunk) -> Tensor:
        """Never: its graphs return indices."""
        raise InputError("selection=device: the graphs return indices, not scores; use decode=dense, or selection=per_row")

    def select(self, chunk: Chunk, rule: Rule, lists: Lists, kernels: Kernels) -> Selection:
        """What the graphs return, as lists. Raises `InputError` for rules that they do not know."""
        self._check(rule)
        with self.use():
            return self._select(chunk, rule, lists)

    def _select(self, chunk: Chunk, rule: Rule, lists: Lists) -> Selection:
        budgets, width = lists.indptr.diff().view(len(chunk.heads), -1) - lists.tail, self.bank.form.pool[1]
        if rule.query_block > 1:
            wanted = -(-budgets // width)  # keys, or blocks of keys
        else:
            wanted = key_block_counts(budgets, lists.candidates, width, rule.min_budget)
        buckets = Buckets.of(self.bank, chunk)
        self.clipped += sum(buckets.clipped)
        _, rows, dim = chunk.q.shape
        sizes = {"rows": rows, "keys": chunk.keys, "head_dim": dim, "heads": self.bank.launch_heads[0]}
        top_k = [self.bank.shape_for(**sizes, top_k=most).top_k for most in wanted.amax(1).clamp(min=1).tolist()]
        plan = buckets.launches(self.bank, chunk, kind=top_k)
        self.launched += len(plan)
        chosen: list[Tensor] = [torch.empty(0)] * len(chunk.heads)
        for members, size in plan:
            order = launch(self.bank, members, size, chunk, buckets, top_k=top_k[members[0]])
            first = order.masked_fill(torch.arange(order.shape[2]) >= wanted[members][:, :, None], _NOWHERE).sort(2).values
            for head, table in zip(members, first, strict=True):
                chosen[head] = table
        return self._keys(chosen, lists, chunk.positions, rule.query_block)

    def _keys(self, chosen: list[Tensor], lists: Lists, positions: Tensor, query_block: int) -> Selection:
        """Blocks [B, k] of each head become the keys in them, as far as they are candidates of the list; its tail follows."""
        width = self.bank.form.pool[1]
        ranked = lists.candidates  # whole blocks of keys, where rows share
        if query_block > 1:
            ranked = ranked // width * width
        end = lists.candidates + lists.tail
        tail = ranked[:, None] + torch.arange(int((end - ranked).max()))
        indices, counts = [], []
        for table in chosen:
            blocks = table.masked_fill(table == _NOWHERE, -1)[:, :, None]
            keys = (blocks * width + torch.arange(width, dtype=torch.int32)).flatten(1)
            valid = (blocks >= 0).expand(-1, -1, width).flatten(1) & (keys < ranked[:, None])
            keys, valid = torch.cat([keys, tail], 1), torch.cat([valid, tail < end[:, None]], 1)
            indices.append(keys[valid].to(torch.int32))
            counts.append(valid.sum(1))
        indptr = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
        return Selection(torch.cat(indices), indptr, positions, query_block)

    @staticmethod
    def check(rule: Rule) -> None:
        """Raises `InputError` for a rule that no graph follows."""
        if rule.sinks or rule.recent or (rule.query_block > 1 and rule.block_score != "max"):
            raise InputError(
                "selection=device: the graphs rank by the maximum over a block and know no sinks or recent keys, got "
                f"block_score={rule.block_score} sinks={rule.sinks} recent={rule.recent}; use block_score=max, or "
                "selection=per_row"
            )

    def _check(self, rule: Rule) -> None:
        form = self.bank.form
        if not form.indices:
            raise InputError("selection=device: the bank's graphs return scores, not indices; build a bank with indices=True")
        if form.pool[0] != rule.query_block:
            raise InputError(
                f"selection=device: the bank's graphs share a list over {form.pool[0]} rows, the rule asks for lists over "
                f"{rule.query_block}; build a bank for it"
            )
        self.check(rule)
