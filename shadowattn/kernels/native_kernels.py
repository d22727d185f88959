"""The native kernels behind the interface of `Kernels`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.kernels import ops
from shadowattn.kernels.torch_kernels import check_per_row
from shadowattn.types import Heads, Lists, Selection, UnionTiles


@dataclass(frozen=True)
class NativeKernels:
    name: str = "native"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, heads: Heads, *, scale: float) -> Tensor:
        """Reads the selected keys where they lie; nothing is gathered."""
        return ops.attend(
            q, k, v, heads.kv, selection.positions, selection.indices, selection.indptr, selection.query_block, scale
        )

    def unite(self, selection: Selection, rows: int) -> UnionTiles:
        """A bit for each row in words over the keys, window by window."""
        check_per_row(selection, rows)
        queries = len(selection.positions)
        indices, members, ends = ops.unite(selection.indices, selection.indptr, queries, rows)
        starts = selection.indptr[:-1].view(-1, queries)[:, ::rows].contiguous().flatten()
        return UnionTiles(indices, members, starts, ends, selection.positions, rows)

    def attend_tiles(self, q: Tensor, k: Tensor, v: Tensor, tiles: UnionTiles, heads: Heads, *, scale: float) -> Tensor:
        """The block kernel, in which each row's lane is hidden from the keys that it does not keep."""
        return ops.attend_tiles(
            q, k, v, heads.kv, tiles.positions, tiles.indices, tiles.members, tiles.starts, tiles.ends, tiles.rows, scale
        )

    def dense(self, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, causal_offset: int, scale: float) -> Tensor:
        """Our own dense attention: the block kernel with every key in the list."""
        count, rows, dim = q.shape
        groups = k.shape[0]
        if rows == 1 and count % groups == 0 and heads.kv.tolist() == [head // (count // groups) for head in range(count)]:
            # Decode: the heads of a group become the rows of a block, so that each key is read once.
            at = torch.full((count // groups,), causal_offset)
            folded = q.reshape(groups, -1, dim)
            return ops.attend(folded, k, v, torch.arange(groups), at, None, None, 1, scale).view(q.shape)
        positions = causal_offset + torch.arange(rows)
        return ops.attend(q, k, v, heads.kv, positions, None, None, 1, scale)

    def select(self, scores: Tensor, lists: Lists, *, out: Tensor | None = None) -> Selection:
        """Bisection over bytes, then full comparisons of what is left."""
        indices = torch.empty(lists.size, dtype=torch.int32) if out is None else out
        ops.select(scores, lists.candidates, lists.tail, lists.indptr, indices, lists.sinks, lists.recent, lists.self_first)
        return Selection(indices, lists.indptr, lists.positions, lists.query_block)
