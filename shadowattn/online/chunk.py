"""What passes through the online stage as one argument: some rows of one layer, for all of its heads or some."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shadowattn.budget import head_retentions
from shadowattn.online.cache import LargestKey, LayerCache
from shadowattn.types import Heads, KeyOffset


@dataclass(frozen=True)
class Chunk:
    """Query rows of one layer and the keys that they can see.

    q [H, Q, D] of the heads `heads`, the rows at `positions` int64 [Q]; k and v [G, K, D] of the whole layer, up to the last
    row's own key; each head keeps `retention` float64 [H] of what a row sees; `scale` multiplies q·k before the softmax.
    `layer_q` [H, Q, D] are the same rows of all of the layer's heads, whichever `heads` are. All tensors are where q is. `cache`
    is what was derived from these keys before. A chunk of some of its heads, `chunk[which]`, shares all of that.
    """

    q: Tensor
    layer_q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    heads: Heads
    retention: Tensor
    scale: float
    layer: int
    cache: LayerCache = field(repr=False, compare=False)
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        retention: float | Tensor = 1.0,
        positions: Tensor | None = None,
        heads: Heads | None = None,
        layer_q: Tensor | None = None,
        scale: float | None = None,
        layer: int = 0,
        cache: LayerCache | None = None,
    ) -> "Chunk":
        """A chunk of tensors alone: of all heads, of the last rows, with a scale of 1/√D and nothing derived before.

        Where `heads` are some of a layer's and no `layer_q` is given, q counts for all of them.
        """
        return cls(
            q=q,
            layer_q=q if layer_q is None else layer_q,
            k=k,
            v=k if v is None else v,
            positions=torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device) if positions is None else positions,
            heads=Heads.all(q.shape[0], k.shape[0], q.device) if heads is None else heads,
            retention=head_retentions(retention, q.shape[0]).to(q.device),
            scale=q.shape[2] ** -0.5 if scale is None else scale,
            layer=layer,
            cache=LayerCache() if cache is None else cache,
        )

    def __getitem__(self, which: slice | Sequence[int]) -> "Chunk":
        """Some heads, by their place in q. Neighbours are not copied."""
        which = as_slice(which, self.q.device)
        if isinstance(which, slice) and which.indices(len(self.heads)) == (0, len(self.heads), 1):
            return self
        return replace(self, q=self.q[which], heads=self.heads[which], retention=self.retention[which])

    def asking(self, rows: Callable[[Tensor], Tensor], positions: Tensor) -> "Chunk":
        """The same heads and keys with other rows, those whose scores a list needs: what `rows` makes of q [H, Q, D]."""
        return replace(self, **self._queries(rows), positions=positions)

    def split(self, tokens: int) -> Iterator[tuple[slice, "Chunk"]]:
        """`tokens` rows at a time, and which they are; each with the keys up to its own last row's."""
        if 0 < self.q.shape[1] <= tokens and int(self.positions[-1]) == self.keys - 1:
            yield slice(0, self.q.shape[1]), self
            return
        for start in range(0, self.q.shape[1], tokens):
            rows = slice(start, min(start + tokens, self.q.shape[1]))
            at = self.positions[rows]
            end = int(at[-1]) + 1
            queries = self._queries(lambda q, rows=rows: q[:, rows])
            yield rows, replace(self, **queries, k=self.k[:, :end], v=self.v[:, :end], positions=at)

    def rewound(self) -> "Chunk":
        """As before its first call, for calling it again: nothing is known of it, and nothing derived from its own keys.

        What estimators add up of its rows is forgotten too, for all heads: whoever goes on behind it calls it with all of them.
        """
        self.cache.rewind(self.k[:, : self.first_position])
        return replace(self)

    def _queries(self, rows: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """What `rows` makes of the queries, of these heads and of the layer's."""
        q = rows(self.q)
        return {"q": q, "layer_q": q if self.layer_q is self.q else rows(self.layer_q)}

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """`make()` the first time, then what it gave: for what an estimator finds out about this chunk as a whole."""
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]

    @property
    def first_position(self) -> int:
        """Where the first row stands."""
        return int(self.positions[0])

    @property
    def keys(self) -> int:
        """K, the number of keys so far."""
        return self.k.shape[1]


def largest_key_scales(chunk: Chunk, key_offset: KeyOffset | None = None) -> Tensor:
    """The INT8 scale of each key head, float32 [G], by the largest magnitude of all its keys so far (of k − offset)."""
    if key_offset is None:
        return chunk.cache.derived("largest key", LargestKey, chunk.k).scales()
    name = f"largest key, {key_offset}"  # two offsets are two things derived from the same keys
    return chunk.cache.derived(name, lambda: LargestKey(key_offset, chunk.layer), chunk.k).scales()


def as_slice(which: slice | Sequence[int], device: torch.device) -> slice | Tensor:
    """A slice where the places are neighbours in order, which copies nothing."""
    if isinstance(which, slice):
        return which
    if isinstance(which, Tensor):
        which = which.tolist()
    first, last = which[0], which[-1]
    neighbours = list(which) == list(range(first, last + 1))
    return slice(first, last + 1) if neighbours else torch.tensor(list(which), device=device)
