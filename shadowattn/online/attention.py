"""shadowAttn for all layers of a model: sparse for a prompt, dense for heads that keep (nearly) every key, either in decode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.budget import head_retentions
from shadowattn.errors import InputError
from shadowattn.exclusive import Exclusive
from shadowattn.kernels import KERNELS, Kernels, choose
from shadowattn.online.break_even import break_even
from shadowattn.online.cache import LayerCache
from shadowattn.online.chunk import Chunk
from shadowattn.online.decode import shared_decode
from shadowattn.online.estimators import Estimator, check_estimator_type
from shadowattn.online.estimators.base import check_place, check_rule
from shadowattn.online.executor import run_ranking
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.online.timeline import Timeline
from shadowattn.types import Heads, Selection, retention_table

DECODES = ("dense", "shared")
# For each sequence of a batch the lists of its sparse heads, a selection for each chunk of its rows.
RankedLists = tuple[tuple[Selection, ...], ...]


@dataclass(frozen=True)
class Attended:
    """What some heads of one layer computed on the same rows, for observers.

    `selection` and `timeline` are None for heads that went dense.
    """

    chunk: Chunk
    rule: Rule
    out: Tensor  # [H, Q, D]
    selection: Selection | None
    timeline: Timeline | None


@dataclass(frozen=True)
class Request:
    """What a layer's call belongs to: a prompt's rows, or those of a decoding step, several where drafted tokens are verified.

    `caches`: what was derived from this layer's keys in earlier calls, one for each sequence of the batch; empty: nothing.
    `lists`: what `SparseAttention.rank` gave for these rows of a prompt; None: lists are made of the call's own q and k.
    """

    decode: bool = False
    caches: tuple[LayerCache, ...] = field(default=(), repr=False)
    lists: RankedLists | None = field(default=None, repr=False)


@dataclass
class Counters:
    """Proof of what ran: (head, row) pairs by path, and the keys that sparse and dense heads kept of those they could see.

    `windowed_rows` are those of layers with a sliding window, dense within it whatever their retention; no density counts them.
    """

    sparse_rows: int = 0
    dense_rows: int = 0
    decode_rows: int = 0
    windowed_rows: int = 0
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


def check_dense_above(value: float | str) -> None:
    """Raises `InputError` on anything but `auto` and a retention; 1 sends only heads dense that keep every key."""
    is_auto = isinstance(value, str) and value == "auto"
    if not is_auto and (isinstance(value, str) or not 0 < checks.number("dense_above", value) <= 1):
        raise InputError(f"dense_above: expected auto or a retention in (0, 1], 1 for never, got {value!r}")


class SparseAttention:
    """Attention for all layers of a model, as `models.replace_attention` calls it.

    `retention` [L][H]. A prompt is worked off in chunks of `chunk_tokens` rows, the height of the bank's graphs; lists are
    made as `query_block`, `block_score`, `sinks`, `recent` and `min_budget` say (`selection.Rule`). Heads of retention
    `dense_above` or more go dense (`auto`: the measured break-even of the kernels in use, above which an INT8 estimate and a
    list cost more than they save, see `online.break_even`). `pipeline` says how the stages of different heads overlap, if at
    all. `decode` says what decoding steps do: `dense`, as in the paper (section 4), or `shared`, one list a key/value group.
    """

    def __init__(
        self,
        retention: Sequence[Sequence[float]],
        estimator: Estimator,
        *,
        chunk_tokens: int = 128,
        query_block: int = 1,
        block_score: str = "leading_query",
        sinks: int = 0,
        recent: int = 0,
        min_budget: int = 1,
        kernel: str = "auto",
        dense_above: float | str = 1.0,
        decode: str = "dense",
        pipeline: Pipeline | None = None,
        observers: Sequence[Callable[[Attended], None]] = (),
    ):
        self.rule = Rule(query_block, block_score, sinks, recent, min_budget)
        query_block, chunk_tokens = self.rule.query_block, checks.integer("chunk_tokens", chunk_tokens, least=1)
        if chunk_tokens % query_block:
            raise InputError(
                f"chunk_tokens: expected a multiple of query_block={query_block}, so that no block straddles two chunks, "
                f"got {chunk_tokens}"
            )
        check_dense_above(dense_above)
        checks.one_of("decode", decode, DECODES)
        checks.one_of("kernel", kernel, KERNELS)
        check_rule(self.rule, type(check_estimator_type(estimator)))
        if pipeline is not None:
            checks.instance("pipeline", pipeline, Pipeline, "make one with shadowattn.online.pipeline.Pipeline(mode)")
        observers = checks.sequence("observers", observers)
        for observe in observers:
            if not callable(observe):
                raise InputError(f"observers: expected functions of one `Attended`, got {checks.shown(observe)}")
        self.retention = [head_retentions(layer, len(layer)) for layer in retention_table(retention)]
        self.estimator, self.chunk_tokens, self.kernel = estimator, chunk_tokens, kernel
        self.dense_above, self.decode = dense_above, decode
        self.pipeline = pipeline or Pipeline()
        self.observers, self.counters = tuple(observers), Counters()
        self._exclusive = Exclusive()  # counters and observers belong to one layer's call at a time

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request: Request = Request()) -> Tensor:
        """q [batch, H, Q, D], k and v [batch, G, K, D] with every cached key; returns [batch, H, Q, D], of any strides.

        Inference only. The output of a single prompt may be the very tensor that observers got.
        """
        scale, caches, kernels = self._checked(layer, q, k, v, scale, request)
        lists = [None] * len(q) if request.lists is None else request.lists
        if request.decode and request.lists is not None:
            raise InputError("request.lists: expected none in a decoding step, whose rows are not ranked ahead; got some")
        if len(lists) != len(q):
            raise InputError(f"request.lists: expected those of {len(q)} sequences, got {len(lists)}")
        with torch.no_grad(), self._exclusive.use():
            if request.decode and self.decode == "dense":
                return self._dense_steps(q, k, v, scale, kernels)
            outs = []
            for *tensors, cache, ranked in zip(q, k, v, caches, lists, strict=True):
                chunk = Chunk.of(*tensors, retention=self.retention[layer], layer=layer, scale=scale, cache=cache)
                outs.append(self._shared_steps(chunk, kernels) if request.decode else self._prefill(chunk, kernels, ranked))
            return torch.stack(outs) if len(outs) > 1 else outs[0][None]  # a stack would copy the only one

    @torch.no_grad()
    def rank(self, layer: int, q: Tensor, k: Tensor, scale: float, request: Request = Request()) -> RankedLists:
        """The lists of a prompt's rows by these q [batch, H, Q, D] and k [batch, G, K, D], for a later call's `Request.lists`.

        The later call may attend with other tensors of the same shapes: lists made early keep what these say. Lists of all heads
        are held at once. `counters` and observers see nothing of it. What estimators derive of k goes into the request's caches;
        crop them where k changes. Another thread may attend for another layer meanwhile.
        """
        scale, caches, kernels = self._checked(layer, q, k, k, scale, request)
        parts, ranked = Parts(self.estimator, self.rule, kernels), []
        sparse = self._sparse(self.retention[layer], q.dtype, kernels)
        if not sparse.any():
            return tuple(() for _ in q)
        for *tensors, cache in zip(q, k, caches, strict=True):
            prompt = Chunk.of(*tensors, retention=self.retention[layer], layer=layer, scale=scale, cache=cache)
            some = prompt if sparse.all() else prompt[sparse.nonzero()[:, 0]]
            ranked.append(tuple(run_ranking(Stages(chunk, parts)) for _, chunk in some.split(self.chunk_tokens)))
        return tuple(ranked)

    def sparse_layers(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> list[bool]:
        """Whether any head of each layer goes sparse, for such tensors; `dense_above=auto` measures its break-even."""
        kernels = choose(self.kernel, head_dim=head_dim, dtype=dtype, device=device)
        return [bool(self._sparse(retention, dtype, kernels).any()) for retention in self.retention]

    def _checked(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request: Request
    ) -> tuple[float, Sequence[LayerCache], Kernels]:
        """The scale as a number, a cache for each sequence, and the kernels for these tensors."""
        checks.integer("layer", layer, most=len(self.retention) - 1)
        checks.tensors(q=q, k=k, v=v)
        checks.without_gradient(q=q, k=k, v=v)
        fits = q.dim() == k.dim() == 4 and k.shape == v.shape and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        fits = fits and 0 not in (*q.shape, *k.shape) and q.shape[2] <= k.shape[2]
        if not fits or q.shape[1] != len(self.retention[layer]) or q.shape[1] % k.shape[1]:
            raise InputError(
                f"layer {layer}: expected q [batch, H, Q, D] of {len(self.retention[layer])} heads, k and v [batch, G, K, D], "
                f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
            )
        scale = checks.softmax_scale(scale, q.shape[3])
        checks.instance("request", request, Request, "make one with shadowattn.online.attention.Request(decode, caches)")
        caches = request.caches or [LayerCache() for _ in q]
        if len(caches) != len(q):
            raise InputError(f"request.caches: expected one for each of {len(q)} sequences, or none, got {len(caches)}")
        self.check_place(q.device)
        return scale, caches, choose(self.kernel, head_dim=q.shape[3], dtype=q.dtype, device=q.device)

    def check_place(self, device: torch.device) -> None:
        """Raises `InputError` where the estimator or the pipeline cannot serve a model on this device."""
        check_place(device, type(self.estimator))
        self.pipeline.check_place(device)

    @torch.no_grad()
    def windowed(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """A layer with a sliding window, dense: each row of q [batch, H, Q, D] sees the last `window` keys up to its own.

        k and v [batch, G, K, D] end with the last row's own key and may begin anywhere at or before the first row's window.
        """
        rows, keys = q.shape[2], k.shape[2]
        self.counters.windowed_rows += q.shape[0] * q.shape[1] * rows
        out = torch.empty_like(q)
        for start in range(0, rows, self.chunk_tokens):
            stop = min(start + self.chunk_tokens, rows)
            first, end = max(0, keys - rows + start - window + 1), keys - rows + stop
            row = torch.arange(keys - rows + start, keys - rows + stop, device=q.device)[:, None]
            key = torch.arange(first, end, device=q.device)
            out[:, :, start:stop] = torch.nn.functional.scaled_dot_product_attention(
                q[:, :, start:stop],
                k[:, :, first:end],
                v[:, :, first:end],
                attn_mask=(key <= row) & (key > row - window),
                scale=scale,
                enable_gqa=True,
            )
        return out

    def _dense_steps(self, q: Tensor, k: Tensor, v: Tensor, scale: float, kernels: Kernels) -> Tensor:
        """Short as these steps are, nothing is made for them that they do not need."""
        batch, count, rows, _ = q.shape
        self.counters.decode_rows += batch * count * rows
        heads, offset = Heads.all(count, k.shape[1], q.device), k.shape[2] - rows
        return torch.stack([kernels.dense(*one, heads, causal_offset=offset, scale=scale) for one in zip(q, k, v, strict=True)])

    def _shared_steps(self, step: Chunk, kernels: Kernels) -> Tensor:
        count, rows, _ = step.q.shape
        self.counters.decode_rows += count * rows
        parts = Parts(self.estimator, self.rule, kernels)
        return torch.cat([shared_decode(row, parts) for _, row in step.split(1)], 1)

    def _sparse(self, retention: Tensor, dtype: torch.dtype, kernels: Kernels) -> Tensor:
        """Which heads go sparse, bool [H]."""
        if self.dense_above != "auto":
            return retention < self.dense_above
        return retention < break_even(kernels, dtype, self.rule, self.estimator.look)

    def _prefill(self, prompt: Chunk, kernels: Kernels, lists: tuple[Selection, ...] | None) -> Tensor:
        sparse = self._sparse(prompt.retention, prompt.q.dtype, kernels)
        if lists is not None and bool(lists) != bool(sparse.any()):
            expected = "lists of the heads that go" if sparse.any() else "none, as no head goes"
            raise InputError(f"request.lists: expected {expected} sparse, got {'some' if lists else 'none'}")
        attend_sparse = partial(self._sparse_heads, lists=lists)
        if sparse.all() or not sparse.any():
            return (attend_sparse if sparse.any() else self._dense_heads)(prompt, kernels)
        out = torch.empty_like(prompt.q, memory_format=torch.contiguous_format)
        for heads, attend in ((sparse, attend_sparse), (~sparse, self._dense_heads)):
            places = heads.nonzero()[:, 0]
            out[places] = attend(prompt[places], kernels)
        return out

    def _dense_heads(self, prompt: Chunk, kernels: Kernels) -> Tensor:
        count, rows, _ = prompt.q.shape
        how = {"causal_offset": prompt.first_position, "scale": prompt.scale}
        out = kernels.dense(prompt.q, prompt.k, prompt.v, prompt.heads, **how)
        self.counters.dense_rows += count * rows
        self.counters.dense_visible += count * int((prompt.positions + 1).sum())
        for observe in self.observers:
            observe(Attended(prompt, self.rule, out, None, None))
        return out

    def _sparse_heads(self, prompt: Chunk, kernels: Kernels, *, lists: tuple[Selection, ...] | None) -> Tensor:
        parts = Parts(self.estimator, self.rule, kernels)
        chunks = list(prompt.split(self.chunk_tokens))
        out = torch.empty_like(prompt.q, memory_format=torch.contiguous_format) if len(chunks) > 1 else None
        ranked_chunks = [None] * len(chunks) if lists is None else lists
        if len(ranked_chunks) != len(chunks):
            raise InputError(f"request.lists: expected those of {len(chunks)} chunks of rows, got {len(ranked_chunks)}")
        for (rows, chunk), ranked in zip(chunks, ranked_chunks, strict=True):
            if ranked is not None:
                _check_ranked(ranked, chunk, self.rule.query_block)
            ran = self.pipeline.run(Stages(chunk, parts), keep_lists=bool(self.observers), lists=ranked)
            if out is None:
                out = ran.out  # the only chunk's, not copied
            else:
                out[:, rows] = ran.out
            count, visible = len(chunk.heads), int((chunk.positions + 1).sum())
            self.counters.sparse_rows += count * ran.out.shape[1]
            self.counters.sparse_kept += ran.selected if isinstance(ran.selected, int) else ran.selected.kept()
            self.counters.sparse_visible += count * visible
            for observe in self.observers:
                observe(Attended(chunk, self.rule, ran.out, ran.selected, ran.timeline))
        return out


def _check_ranked(lists: Selection, chunk: Chunk, query_block: int) -> None:
    fits = len(lists.counts) == len(chunk.heads) and lists.query_block == query_block
    if not fits or not torch.equal(lists.positions, chunk.positions):
        raise InputError(
            f"request.lists: expected lists of {len(chunk.heads)} heads for rows {chunk.first_position} to "
            f"{int(chunk.positions[-1])}, got those of other rows or heads; rank and attend with the same ones"
        )
