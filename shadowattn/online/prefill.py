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
    """Heads of one layer that took the same path on the same rows, for observers.

    q and out [H, Q, D]; k and v [G, K, D] up to the last row's own key; retention [H]. `selection` is None for heads that kept
    every key.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    retention: Tensor
    selection: Selection | None
    block_score: str
    out: Tensor


@dataclass
class Counters:
    """Proof of what ran: (head, row) pairs by path, and the keys that sparse and dense heads kept of those they could see."""

    sparse_rows: int = 0
    dense_rows: int = 0
    decode_rows: int = 0
    sparse_kept: int = 0
    sparse_visible: int = 0
    dense_visible: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    @property
    def density(self) -> float:
        """Share of visible keys attended to in prefill, over all heads."""
        visible = self.sparse_visible + self.dense_visible
        return (self.sparse_kept + self.dense_visible) / visible if visible else 1.0

    @property
    def sparse_density(self) -> float:
        """The same over the heads that took the sparse path; 1 where none did."""
        return self.sparse_kept / self.sparse_visible if self.sparse_visible else 1.0


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

    @torch.no_grad()  # inference only: neither indices nor INT8 graphs have a gradient
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [batch, H, Q, D], k and v [batch, G, K, D] with every cached key; returns [batch, H, Q, D]."""
        return torch.stack([self._sequence(layer, *item, scale) for item in zip(q, k, v, strict=True)])

    def _sequence(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        heads, rows, _ = q.shape
        if rows == 1 and k.shape[1] > 1:
            self.counters.decode_rows += heads
            return dense(q, k, v, causal_offset=k.shape[1] - 1, scale=scale)
        sparse = self.retention[layer] < 1
        if sparse.all():
            return self._sparse_heads(layer, q, k, v, self.retention[layer], scale)
        if not sparse.any():
            return self._dense_heads(layer, q, k, v, scale)
        out = torch.empty_like(q)
        kv_head = torch.arange(heads) // (heads // k.shape[0])
        # Only a layer that mixes both paths pays for copies of its key heads.
        some, rest = sparse.nonzero()[:, 0], (~sparse).nonzero()[:, 0]
        part = (q[some], k[kv_head[some]], v[kv_head[some]])
        out[some] = self._sparse_heads(layer, *part, self.retention[layer][some], scale)
        out[rest] = self._dense_heads(layer, q[rest], k[kv_head[rest]], v[kv_head[rest]], scale)
        return out

    def _dense_heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        heads, rows, _ = q.shape
        offset = k.shape[1] - rows
        out = dense(q, k, v, causal_offset=offset, scale=scale)
        self.counters.dense_rows += heads * rows
        self.counters.dense_visible += heads * sum(range(offset + 1, offset + rows + 1))
        for observe in self.observers:
            everything = torch.ones(heads, dtype=torch.float64)
            observe(Attended(layer, q, k, v, scale, everything, None, self.block_score, out))
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
            self.counters.sparse_kept += selection.kept()
            self.counters.sparse_visible += heads * int((positions[at] + 1).sum())
            for observe in self.observers:
                done = out[:, at]
                observe(Attended(layer, chunk, keys, values, scale, retention, selection, self.block_score, done))
        return out
