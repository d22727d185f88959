"""shadowAttn inside a model: sparse in prefill, dense in decode and for heads that keep every key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.budget import head_retentions
from shadowattn.errors import InputError
from shadowattn.online.attention import attend, dense
from shadowattn.online.estimators import Estimator
from shadowattn.online.path import select_keys
from shadowattn.types import Selection


@dataclass(frozen=True)
class Attended:
    """One chunk of one layer as it went through the sparse path, for observers: q [H, Q, D], k and v [G, K, D] up to its last key.

    Only the heads that took the sparse path: H and G count those.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    retention: Tensor
    selection: Selection
    out: Tensor


@dataclass
class Counters:
    """Proof of what ran. (head, row) pairs by path, and the keys that the sparse ones kept of those they could see."""

    sparse_rows: int = 0
    dense_rows: int = 0
    decode_rows: int = 0
    kept_keys: int = 0
    visible_keys: int = 0

    @property
    def density(self) -> float:
        """Share of visible keys attended to on the sparse path; 1 where nothing took it."""
        return self.kept_keys / self.visible_keys if self.visible_keys else 1.0


class SparsePrefill:
    """Attention for all layers of a model, as `models.replace_attention` calls it.

    `retention` [L][H]. A prompt is worked off in chunks of `chunk_tokens` rows, the height of the bank's graphs. A call with
    one row on several keys is taken for decode and is dense, as in the paper (section 4); so is every head of retention 1.
    """

    def __init__(
        self,
        retention: Sequence[Sequence[float]],
        estimator: Estimator,
        *,
        chunk_tokens: int = 128,
        query_block: int = 1,
        block_score: str = "first_row",
        observers: Sequence[Callable[[Attended], None]] = (),
    ):
        if chunk_tokens < 1 or chunk_tokens % query_block:
            raise InputError(
                f"chunk_tokens: expected a multiple of query_block={query_block}, so that no block straddles two chunks, "
                f"got {chunk_tokens}"
            )
        self.retention = [head_retentions(torch.tensor(layer, dtype=torch.float64), len(layer)) for layer in retention]
        self.estimator, self.chunk_tokens = estimator, chunk_tokens
        self.query_block, self.block_score = query_block, block_score
        self.observers, self.counters = tuple(observers), Counters()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [batch, H, Q, D], k and v [batch, G, K, D] with every cached key; returns [batch, H, Q, D]."""
        return torch.stack([self._sequence(layer, *item, scale) for item in zip(q, k, v, strict=True)])

    def _sequence(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        heads, rows, _ = q.shape
        offset = k.shape[1] - rows
        if rows == 1 and offset:
            self.counters.decode_rows += heads
            return dense(q, k, v, causal_offset=offset, scale=scale)
        sparse = self.retention[layer] < 1
        self.counters.dense_rows += rows * int((~sparse).sum())
        if not sparse.any():
            return dense(q, k, v, causal_offset=offset, scale=scale)
        out = torch.empty_like(q)
        for members, is_sparse in ((sparse.nonzero()[:, 0], True), ((~sparse).nonzero()[:, 0], False)):
            if len(members) == 0:
                continue
            whole = len(members) == heads
            # A part of the heads reads its key heads through a copy; all of them read K and V in place.
            kv_head = members // (heads // k.shape[0])
            part = (q, k, v) if whole else (q[members], k[kv_head], v[kv_head])
            out[members] = (
                self._sparse_heads(layer, *part, self.retention[layer][members], scale)
                if is_sparse
                else dense(*part, causal_offset=offset, scale=scale)
            )
        return out

    def _sparse_heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor, retention: Tensor, scale: float) -> Tensor:
        heads, rows, _ = q.shape
        positions = k.shape[1] - rows + torch.arange(rows)
        out = torch.empty_like(q)
        for at in torch.arange(rows).split(self.chunk_tokens):
            chunk, end = q[:, at], int(positions[at[-1]]) + 1
            keys, values = k[:, :end], v[:, :end]
            selection = select_keys(
                chunk,
                keys,
                retention,
                layer=layer,
                positions=positions[at],
                estimator=self.estimator,
                query_block=self.query_block,
                block_score=self.block_score,
            )
            out[:, at] = attend(chunk, keys, values, selection, scale=scale)
            self.counters.sparse_rows += heads * len(at)
            self.counters.kept_keys += selection.kept()
            self.counters.visible_keys += heads * int((positions[at] + 1).sum())
            for observe in self.observers:
                observe(Attended(layer, chunk, keys, values, scale, retention, selection, out[:, at]))
        return out
