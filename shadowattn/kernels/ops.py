"""The native kernels as torch operators, so that torch.compile and export see shapes instead of an opaque call.

`torch.ops.shadowattn.NAME`; each has a fake kernel that only says what the result looks like. Axes as in `shadowattn.types`.
What C++ would read past its end or misread is refused here, at last. Of the lists only the ends are looked at: ascending as they
must be, all else lies between.
"""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.budget import keep_counts
from shadowattn.errors import InputError
from shadowattn.kernels import native
from shadowattn.types import MOST_TILE_ROWS

_DTYPES = (torch.float32, torch.bfloat16)


class Operator:
    """A function as the operator `torch.ops.shadowattn.NAME`, with a fake kernel that `register_fake` takes.

    Plain tensors reach the function directly: torch's dispatch takes longer than a short kernel. The operator is called under
    torch.compile and torch.jit.trace, in a dispatch mode, for gradients, and for tensors of other classes or without values.
    """

    def __init__(self, function: Callable[..., Any], mutates: tuple[str, ...]):
        self._function = function
        self.operator = torch.library.custom_op(f"shadowattn::{function.__name__}", function, mutates_args=mutates)
        self.register_fake = self.operator.register_fake
        update_wrapper(self, function)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return (self._function if _plain(*arguments, *options.values()) else self.operator)(*arguments, **options)


def _plain(*arguments: Any) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return False
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if not all(type(x) is Tensor and not x.is_meta for x in tensors):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def operator(*, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Operator]:
    return lambda function: Operator(function, mutates)


@operator()
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_head: Tensor,
    positions: Tensor,
    indices: Tensor | None,
    indptr: Tensor | None,
    query_block: int,
    scale: float,
) -> Tensor:
    """Attention of q [H, Q, D] on listed keys (or, without lists, on all up to each row's own); returns [H, Q, D]."""
    _check(q, k, v, kv_head)
    checks.vector("positions", positions, q.shape[1])
    checks.ascending("positions", positions, least=0, below=k.shape[1])
    checks.integer("query_block", query_block, least=1)
    if (indptr is None) != (indices is None):
        raise InputError("expected indices and indptr, or neither for every key, got one of them")
    if indptr is not None:
        _check_lists(indices, indptr, q.shape[0] * -(-q.shape[1] // query_block), k.shape[1])
    out = torch.empty(q.shape, dtype=q.dtype)
    native.attend(
        _rows(q), _rows(k), _rows(v), out, kv_head=kv_head, positions=positions, indices=indices, indptr=indptr,
        query_block=query_block, scale=scale,
    )  # fmt: skip
    return out


@attend.register_fake
def _(q, k, v, kv_head, positions, indices, indptr, query_block, scale):
    return q.new_empty(q.shape)


@operator()
def unite(row_indices: Tensor, row_indptr: Tensor, rows: int, tile_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unions of the lists of `tile_rows` rows each, of `rows` rows a head: `indices`, `members` and `ends` of `UnionTiles`.

    Its `starts` are the places of the lists of every tile's first row.
    """
    checks.integer("tile_rows", tile_rows, least=1, most=MOST_TILE_ROWS)
    checks.integer("rows", rows, least=1)
    if (len(row_indptr) - 1) % rows:
        raise InputError(f"row_indptr: expected a list for each of {rows} rows of every head, got {len(row_indptr) - 1} lists")
    _check_lists(row_indices, row_indptr, len(row_indptr) - 1, checks.MOST)
    indices, members = torch.empty_like(row_indices), torch.empty(row_indices.shape, dtype=torch.int64)
    ends = torch.empty(_tiles(row_indptr, rows, tile_rows), dtype=torch.int64)
    native.unite(row_indices, row_indptr, indices, members, ends, rows=rows, query_block=tile_rows)
    return indices, members, ends


@unite.register_fake
def _(row_indices, row_indptr, rows, tile_rows):
    members = row_indices.new_empty(row_indices.shape, dtype=torch.int64)
    return torch.empty_like(row_indices), members, row_indptr.new_empty(_tiles(row_indptr, rows, tile_rows))


@operator()
def attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_head: Tensor,
    positions: Tensor,
    indices: Tensor,
    members: Tensor,
    starts: Tensor,
    ends: Tensor,
    tile_rows: int,
    scale: float,
) -> Tensor:
    """Attention of q [H, Q, D] on the rows' own keys, read by tiles of rows as in `UnionTiles`; returns [H, Q, D]."""
    _check(q, k, v, kv_head)
    checks.vector("positions", positions, q.shape[1])
    checks.ascending("positions", positions, least=0, below=k.shape[1])
    checks.integer("tile_rows", tile_rows, least=1, most=MOST_TILE_ROWS)
    _check_unions(indices, members, starts, ends, q.shape[0] * -(-q.shape[1] // tile_rows), k.shape[1])
    out = torch.empty(q.shape, dtype=q.dtype)
    native.attend(
        _rows(q), _rows(k), _rows(v), out, kv_head=kv_head, positions=positions, indices=indices, indptr=starts,
        query_block=tile_rows, scale=scale, ends=ends, members=members,
    )  # fmt: skip
    return out


@attend_tiles.register_fake
def _(q, k, v, kv_head, positions, indices, members, starts, ends, tile_rows, scale):
    return q.new_empty(q.shape)


@operator(mutates=("indices",))
def select(
    scores: Tensor, candidates: Tensor, tail: Tensor, indptr: Tensor, indices: Tensor, sinks: int, recent: int, self_first: bool
) -> None:
    """All lists one after another into `indices` int32, from scores [H, B, K]; arguments as in `Lists`."""
    checks.tensors((torch.float32, torch.float16, torch.int8), scores=scores)
    checks.placed(checks.CPU, scores=scores)
    if scores.dim() != 3 or scores.shape[0] < 1:
        raise InputError(f"scores: expected [H, B, K], got {list(scores.shape)}")
    checks.vector("indices", indices, len(indices), dtype=torch.int32)
    _check_budgets(candidates, tail, indptr, len(indices), sinks, recent, *scores.shape)
    lists = {"candidates": candidates, "tail": tail, "indptr": indptr, "indices": indices}
    native.select(_rows(scores), **lists, sinks=sinks, recent=recent, self_first=self_first)


@select.register_fake
def _(scores, candidates, tail, indptr, indices, sinks, recent, self_first):
    return None


@operator(mutates=("packed", "by_key"))
def pack(k: Tensor, scales: Tensor, packed: Tensor, first_key: int, by_key: Tensor | None) -> None:
    """Quantises k [G, rows, D] by scales float32 [G] into `packed` uint8 [G, K / 16, D / 4, 16, 4], from `first_key` on; the same
    bytes also into `by_key` [G, K, D], where it is given.
    """
    _check_quantisable(k, packed, scales)
    checks.integer("first_key", first_key)
    if k.shape[0] != packed.shape[0]:
        raise InputError(f"packed: expected as many heads as k has, {k.shape[0]}, got {packed.shape[0]}")
    if first_key + k.shape[1] > packed.shape[1] * 16:
        raise InputError(f"packed: expected room for {first_key + k.shape[1]} keys, got {packed.shape[1] * 16}")
    if by_key is not None:
        _check_by_key(by_key, packed.shape[0], first_key + k.shape[1], k.shape[2])
    native.pack(_rows(k), scales, packed, first_key, by_key)


@pack.register_fake
def _(k, scales, packed, first_key, by_key):
    return None


@operator()
def largest(x: Tensor) -> Tensor:
    """The largest magnitude of each head of x [heads, rows, D], float32 [heads]; NaN where there is one."""
    checks.tensors(_DTYPES, x=x)
    checks.placed(checks.CPU, x=x)
    if x.dim() != 3 or 0 in x.shape:
        raise InputError(f"x: expected [heads, rows, D], nothing empty, got {list(x.shape)}")
    out = torch.empty(x.shape[0], dtype=torch.float32)
    native.largest(_rows(x), out)
    return out


@largest.register_fake
def _(x):
    return x.new_empty(x.shape[0], dtype=torch.float32)


@operator()
def estimate(
    q: Tensor,
    q_scales: Tensor,
    packed: Tensor,
    keys: int,
    kv_head: Tensor,
    visible: Tensor,
    pooling: str,
    query_block: int,
    exponents: Tensor | None = None,
) -> Tensor:
    """Exact INT8 products of quantised q [H, Q, D] with packed keys, float32 [H, B, K]; B = Q where rows are not pooled.

    `exponents` float32 [H], for pooling by `probability`: exp(logit) = 2^(product · exponent).
    """
    _check_estimate(q, q_scales, packed, keys, kv_head, visible, pooling, query_block, exponents)
    scores = torch.empty(q.shape[0], _lists(q, pooling, query_block), keys, dtype=torch.float32)
    native.estimate(
        _rows(q), q_scales, packed, keys=keys, kv_head=kv_head, visible=visible, pooling=pooling, query_block=query_block,
        exponents=exponents, scores=scores,
    )  # fmt: skip
    return scores


@estimate.register_fake
def _(q, q_scales, packed, keys, kv_head, visible, pooling, query_block, exponents=None):
    return q.new_empty(q.shape[0], _lists(q, pooling, query_block), keys, dtype=torch.float32)


@operator()
def shared_scores(q: Tensor, q_scales: Tensor, packed: Tensor, keys: int) -> Tensor:
    """The scores by which the heads of q [H, 1, D] share lists, one a key head of `packed`: float32 [G, 1, K].

    A head's INT8 products with the keys are divided by their standard deviation over the keys, and summed over the heads of a key
    head, which follow one another. A head whose products differ by less than a millionth of the largest one has no say.
    """
    _check_shared(q, q_scales, packed, keys)
    scores = torch.empty(len(packed), 1, keys, dtype=torch.float32)
    native.shared_scores(_rows(q), q_scales, packed, scores)
    return scores


@shared_scores.register_fake
def _(q, q_scales, packed, keys):
    return q.new_empty(len(packed), 1, keys, dtype=torch.float32)


@operator()
def attend_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scales: Tensor | None,
    packed: Tensor,
    counts: list[int],
    sinks: int,
    recent: int,
    self_first: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`shared_scores`, `select` and `attend` in one call: q [H, 1, D], k and v [G, K, D]. Returns [H, 1, D] and indices int32, a
    list of `counts` [G] keys for each key head.

    `q_scales` None: those of q itself. `sinks`, `recent` and `self_first` as in `Lists`, of which all keys are candidates.
    """
    _check_qkv(q, k, v)
    groups, keys, dim = k.shape
    _check_shared(q, q_scales, packed, keys, measured=q_scales is None)
    if len(packed) != groups:
        raise InputError(f"packed: expected as many key heads as k has, {groups}, got {len(packed)}")
    if len(counts) != groups or not all(1 <= count <= keys for count in counts):
        raise InputError(f"counts: expected 1 … {keys} keys for each of {groups} key heads, got {counts}")
    checks.integer("sinks", sinks)
    checks.integer("recent", recent)
    indices, heads = torch.empty(sum(counts), dtype=torch.int32), len(q) // groups
    out = torch.empty(groups, heads, dim, dtype=q.dtype)
    native.shared_step(
        q.reshape(groups, heads, dim).contiguous(), _rows(k), _rows(v), out, indices, q_scales=q_scales, packed=packed,
        counts=counts, sinks=sinks, recent=recent, self_first=self_first, scale=scale,
    )  # fmt: skip
    return out.view(q.shape), indices


@attend_shared.register_fake
def _(q, k, v, q_scales, packed, counts, sinks, recent, self_first, scale):
    return q.new_empty(q.shape), q.new_empty(sum(counts), dtype=torch.int32)


@operator()
def estimate_select(
    q: Tensor,
    q_scales: Tensor,
    packed: Tensor,
    keys: int,
    kv_head: Tensor,
    visible: Tensor,
    pooling: str,
    query_block: int,
    candidates: Tensor,
    tail: Tensor,
    indptr: Tensor,
    size: int,
    sinks: int,
    recent: int,
    self_first: bool,
    exponents: Tensor | None = None,
) -> Tensor:
    """`estimate` and `select` in one pass, tile by tile: no score ever reaches memory. Returns indices int32 [size]."""
    _check_estimate(q, q_scales, packed, keys, kv_head, visible, pooling, query_block, exponents)
    _check_budgets(candidates, tail, indptr, size, sinks, recent, q.shape[0], _lists(q, pooling, query_block), keys)
    indices = torch.empty(size, dtype=torch.int32)
    lists = _places(candidates, tail, indptr, indices, sinks, recent, self_first)
    native.estimate(
        _rows(q), q_scales, packed, keys=keys, kv_head=kv_head, visible=visible, pooling=pooling, query_block=query_block,
        exponents=exponents, lists=lists,
    )  # fmt: skip
    return indices


@estimate_select.register_fake
def _(
    q, q_scales, packed, keys, kv_head, visible, pooling, query_block, candidates, tail, indptr, size, sinks, recent, self_first,
    exponents=None,
):  # fmt: skip
    return q.new_empty(size, dtype=torch.int32)


@operator()
def attend_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scales: Tensor | None,
    packed: Tensor,
    kv_head: Tensor,
    positions: Tensor,
    retention: Tensor,
    min_budget: int,
    sinks: int,
    recent: int,
    self_first: bool,
    scale: float,
    size: int | None = None,
    first_rows: int = 0,
    near: int = 0,
    candidates: float = 1.0,
    spared: Tensor | None = None,
    by_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`estimate_select` of lists of one row and `attend` to them in one pass: no list reaches memory unless its `size` is given.

    `q_scales` None: those of q itself. A row's list is as long as `keep_counts` says, of `retention` float64 [H]; `size` is that
    of all lists together.

    With `first_rows` the rows of a block of so many choose from what a first look by the mean of their integers lets through: of
    the keys that the block's first row sees `candidates` times as many as its last row keeps, the last `near` of them and the
    sinks, and all later keys. Blocks of the heads in `spared` bool [H] let every key through. `by_key` uint8 [G, K or more, D]
    are the packed keys' bytes.

    Returns [H, Q, D], indices int32 [size], or [0] where nobody wants the lists, and how many keys all rows keep, int64 [1].
    """
    _check(q, k, v, kv_head)
    checks.vector("positions", positions, q.shape[1])
    checks.ascending("positions", positions, least=0, below=k.shape[1])
    _check_products(q, q_scales, packed, k.shape[1], k.shape[0], measured=q_scales is None)
    checks.vector("retention", retention, q.shape[0], dtype=torch.float64)
    if not all(0 < kept <= 1 for kept in retention.tolist()):
        raise InputError(f"retention: expected values in (0, 1], got {retention.tolist()}")
    for name, value, least in (("min_budget", min_budget, 1), ("sinks", sinks, 0), ("recent", recent, 0)):
        checks.integer(name, value, least=least)
    if size is not None:
        listed = int(keep_counts(retention, positions + 1, min_budget).sum())
        if size != listed:
            raise InputError(f"size: expected the length of all lists, {listed}, got {size}")
    first_look = None
    if first_rows or spared is not None or by_key is not None:
        first_look = _first_look(first_rows, near, candidates, spared, by_key, q, k, recent)
    out, indices = torch.empty(q.shape, dtype=q.dtype), torch.empty(size or 0, dtype=torch.int32)
    kept = torch.empty(1, dtype=torch.int64)
    native.fused_rows(
        _rows(q), _rows(k), _rows(v), out, kept, q_scales=q_scales, packed=packed, kv_head=kv_head, positions=positions,
        retention=retention, min_budget=min_budget, scale=scale, sinks=sinks, recent=recent, self_first=self_first,
        indices=None if size is None else indices, first_look=first_look,
    )  # fmt: skip
    return out, indices, kept


@attend_chosen.register_fake
def _(
    q, k, v, q_scales, packed, kv_head, positions, retention, min_budget, sinks, recent, self_first, scale, size=None,
    first_rows=0, near=0, candidates=1.0, spared=None, by_key=None,
):  # fmt: skip
    return q.new_empty(q.shape), q.new_empty(size or 0, dtype=torch.int32), q.new_empty(1, dtype=torch.int64)


@operator()
def attend_chosen_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scored: Tensor,
    q_scales: Tensor,
    packed: Tensor,
    kv_head: Tensor,
    positions: Tensor,
    visible: Tensor,
    pooling: str,
    query_block: int,
    candidates: Tensor,
    tail: Tensor,
    indptr: Tensor,
    size: int,
    sinks: int,
    recent: int,
    self_first: bool,
    scale: float,
    listed: bool,
    exponents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`estimate_select` of lists that `query_block` rows share and `attend` to them in one pass: no list reaches memory unless it
    is `listed`.

    `scored` [H, rows, D] are the queries by which lists are ranked, and `visible` int64 [rows] how many keys each sees: a query
    for every list where `pooling` is `rows`, otherwise q itself. Returns [H, Q, D] and indices int32 [size], or [0] where nobody
    wants the lists.
    """
    _check(q, k, v, kv_head)
    checks.vector("positions", positions, q.shape[1])
    checks.ascending("positions", positions, least=0, below=k.shape[1])
    _check_estimate(scored, q_scales, packed, k.shape[1], kv_head, visible, pooling, query_block, exponents)
    lists = -(-q.shape[1] // query_block)
    expected = [q.shape[0], lists if pooling == "rows" else q.shape[1], q.shape[2]]
    if list(scored.shape) != expected or scored.dtype != q.dtype:
        raise InputError(f"scored: expected {expected} of {q.dtype}, got {list(scored.shape)} of {scored.dtype}")
    if pooling != "rows" and not visible.equal(positions + 1):
        raise InputError("visible: expected the keys up to each row's own where rows are pooled, got others")
    _check_budgets(candidates, tail, indptr, size, sinks, recent, q.shape[0], lists, k.shape[1])
    last = positions[torch.arange(query_block - 1, lists * query_block, query_block).clamp(max=q.shape[1] - 1)]
    if (candidates + tail > last + 1).any():
        raise InputError("candidates, tail: expected keys up to the last row of each block, got later ones")
    out, indices = torch.empty(q.shape, dtype=q.dtype), torch.empty(size if listed else 0, dtype=torch.int32)
    to = _places(candidates, tail, indptr, indices if listed else None, sinks, recent, self_first)
    native.fused_blocks(
        _rows(q), _rows(k), _rows(v), out, scored=_rows(scored), q_scales=q_scales, packed=packed, kv_head=kv_head,
        positions=positions, visible=visible, pooling=pooling, query_block=query_block, exponents=exponents, scale=scale,
        lists=to,
    )  # fmt: skip
    return out, indices


@attend_chosen_blocks.register_fake
def _(
    q, k, v, scored, q_scales, packed, kv_head, positions, visible, pooling, query_block, candidates, tail, indptr, size, sinks,
    recent, self_first, scale, listed, exponents=None,
):  # fmt: skip
    return q.new_empty(q.shape), q.new_empty(size if listed else 0, dtype=torch.int32)


def _first_look(
    rows: int, near: int, candidates: float, spared: Tensor | None, by_key: Tensor | None, q: Tensor, k: Tensor, recent: int
) -> dict[str, Tensor | int | float]:
    """What `native.fused_rows` takes of a first look, checked."""
    checks.integer("first_rows", rows, least=8, most=64)
    checks.integer("near", near, least=max(1, recent))
    checks.number("candidates", candidates, least=1)
    if rows % 8:
        raise InputError(f"first_rows: expected a multiple of 8, got {rows}")
    if spared is None or by_key is None:
        raise InputError("a first look: expected first_rows, spared and by_key, got some of them")
    checks.vector("spared", spared, q.shape[0], dtype=torch.bool)
    _check_by_key(by_key, *k.shape)
    return {"rows": rows, "near": near, "candidates": candidates, "spared": spared, "by_key": by_key}


def _check_by_key(by_key: Tensor, heads: int, keys: int, dim: int) -> None:
    checks.tensors((torch.uint8,), by_key=by_key)
    checks.placed(checks.CPU, by_key=by_key)
    if by_key.dim() != 3 or by_key.shape[0] != heads or by_key.shape[1] < keys or by_key.shape[2] != dim:
        raise InputError(f"by_key: expected [G, K or more, D] of {[heads, keys, dim]}, got {list(by_key.shape)}")
    if not by_key[0].is_contiguous():
        raise InputError("by_key: expected one key after another")


def _places(
    candidates: Tensor, tail: Tensor, indptr: Tensor, indices: Tensor | None, sinks: int, recent: int, self_first: bool
) -> dict[str, Tensor | int | None]:
    """Where lists go and what they keep, as `native` takes it."""
    lists = {"candidates": candidates, "tail": tail, "indptr": indptr, "indices": indices}
    return lists | {"sinks": sinks, "recent": recent, "self_first": self_first}


def _lists(q: Tensor, pooling: str, query_block: int) -> int:
    return q.shape[1] if pooling == "rows" else -(-q.shape[1] // query_block)


def _tiles(row_indptr: Tensor, rows: int, tile_rows: int) -> int:
    return (len(row_indptr) - 1) // rows * -(-rows // tile_rows)


def _rows(x: Tensor) -> Tensor:
    """x with a contiguous last axis; caches and their slices have one and are not copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor, kv_head: Tensor) -> None:
    _check_qkv(q, k, v)
    checks.vector("kv_head", kv_head, q.shape[0])
    checks.within("kv_head", kv_head, least=0, most=k.shape[0] - 1)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    checks.tensors(_DTYPES, q=q, k=k, v=v)
    checks.placed(checks.CPU, q=q, k=k, v=v)
    if not (q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2]) or 0 in (*q.shape, *k.shape):
        raise InputError(
            f"expected q [H, Q, D], k and v [G, K, D], nothing empty, got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[2] % 8 or q.shape[2] > 256:
        raise InputError(
            f"native attention: expected a head dimension that is a multiple of 8 up to 256, got {q.shape[2]}; use kernel=torch"
        )


def _check_lists(indices: Tensor, indptr: Tensor, lists: int, keys: int) -> None:
    """Lists of at least one key each, whose first and last keys exist."""
    checks.vector("indices", indices, indices.numel(), dtype=torch.int32)
    checks.vector("indptr", indptr, lists + 1)
    ends = indptr.numpy()
    if ends[0] != 0 or ends[-1] != len(indices) or (np.diff(ends) < 1).any():
        raise InputError(f"indptr: expected to rise from 0 to {len(indices)}, a key or more a list, got {ends[:3]} … {ends[-3:]}")
    listed = indices.numpy()
    if listed[ends[:-1]].min() < 0 or listed[ends[1:] - 1].max() >= keys:
        raise InputError(f"indices: expected keys of 0 … {keys - 1}, ascending in each list, got others")


def _check_unions(indices: Tensor, members: Tensor, starts: Tensor, ends: Tensor, tiles: int, keys: int) -> None:
    """Unions of at least one key each, within `indices`, whose first and last keys exist."""
    checks.vector("indices", indices, indices.numel(), dtype=torch.int32)
    checks.vector("members", members, indices.numel())
    for name, x in (("starts", starts), ("ends", ends)):
        checks.vector(name, x, tiles)
    first, end, listed = starts.numpy(), ends.numpy(), indices.numpy()
    if first.min() < 0 or end.max() > len(listed) or (end <= first).any():
        raise InputError(
            f"starts, ends: expected a key or more a tile, within {len(listed)} places, got {first[:3]} and {end[:3]} …"
        )
    if listed[first].min() < 0 or listed[end - 1].max() >= keys:
        raise InputError(f"indices: expected keys of 0 … {keys - 1}, ascending in each union, got others")


def _check_budgets(
    candidates: Tensor, tail: Tensor, indptr: Tensor, size: int, sinks: int, recent: int, heads: int, lists: int, keys: int
) -> None:
    """Places that hold exactly what is selected: lists of a key or more, none with more keys than its candidates and tail."""
    for name, x in (("candidates", candidates), ("tail", tail)):
        checks.vector(name, x, lists)
    checks.vector("indptr", indptr, heads * lists + 1)
    checks.integer("sinks", sinks)
    checks.integer("recent", recent)
    checks.within("candidates", candidates, least=0, most=keys)
    checks.within("tail", tail, least=0, most=checks.MOST)
    ends = indptr.numpy()
    lengths = (ends[1:] - ends[:-1]).reshape(heads, lists)
    chosen = lengths - tail.numpy()
    empty = (lengths < 1).any() or (chosen < 0).any()
    if ends[0] != 0 or ends[-1] != size or empty or (chosen > candidates.numpy()).any():
        raise InputError(
            f"indptr: expected to rise from 0 to {size}, each list by at most its candidates and tail keys, got {ends[:3]} … "
            f"{ends[-3:]}"
        )


def _check_estimate(
    q: Tensor,
    q_scales: Tensor,
    packed: Tensor,
    keys: int,
    kv_head: Tensor,
    visible: Tensor,
    pooling: str,
    query_block: int,
    exponents: Tensor | None,
) -> None:
    _check_products(q, q_scales, packed, keys, packed.shape[0])
    checks.vector("kv_head", kv_head, q.shape[0])
    checks.within("kv_head", kv_head, least=0, most=packed.shape[0] - 1)
    checks.one_of("pooling", pooling, native.POOLINGS)
    checks.integer("query_block", query_block, least=1)
    checks.vector("visible", visible, q.shape[1])
    checks.ascending("visible", visible, least=1, below=keys + 1)
    if pooling == "probability":
        checks.vector("exponents", exponents, q.shape[0], dtype=torch.float32)
        if not (exponents.numpy() >= 0).all():
            raise InputError(f"exponents: expected numbers of 0 or more, got {exponents.tolist()}")


def _check_products(q: Tensor, q_scales: Tensor | None, packed: Tensor, keys: int, groups: int, measured: bool = False) -> None:
    _check_quantisable(q, packed, q_scales, measured)
    _check_room(packed, keys)
    if packed.shape[0] != groups:
        raise InputError(f"packed: expected as many key heads as k has, {groups}, got {packed.shape[0]}")


def _check_shared(q: Tensor, q_scales: Tensor | None, packed: Tensor, keys: int, measured: bool = False) -> None:
    _check_quantisable(q, packed, q_scales, measured)
    groups = len(packed)
    if q.shape[1] != 1 or not groups or len(q) % groups:
        raise InputError(f"q: expected [H, 1, D], as many heads for each of {groups} key heads, got {list(q.shape)}")
    _check_room(packed, keys)


def _check_room(packed: Tensor, keys: int) -> None:
    checks.integer("keys", keys, least=1)
    if -(-keys // 32) * 32 > packed.shape[1] * 16:
        raise InputError(f"packed: expected room for {-(-keys // 32) * 32} keys, whole steps of 32, got {packed.shape[1] * 16}")


def _check_quantisable(x: Tensor, packed: Tensor, scales: Tensor | None, measured: bool = False) -> None:
    """`measured`: the kernel itself finds scales."""
    checks.tensors((torch.uint8,), packed=packed)
    checks.placed(checks.CPU, packed=packed, x=x)
    tiled = packed.dim() == 5 and packed.shape[3:] == (16, 4) and packed.is_contiguous()
    dim = x.shape[-1] if x.dim() == 3 else 0
    if not tiled or x.dtype not in _DTYPES or dim % 8 or not 0 < dim <= 256 or packed.shape[2] * 4 != dim or not x.shape[0]:
        raise InputError(
            "native estimate: expected [heads, rows, D] in float32 or bfloat16, a head dimension that is a multiple of 8 up to "
            f"256, and keys packed for it, got {list(x.shape)} of {x.dtype}, packed {list(packed.shape)}; use "
            "estimator=int8_graph"
        )
    checks.tensors(_DTYPES, x=x)
    if measured:
        return
    checks.vector("scales", scales, x.shape[0], dtype=torch.float32)
    if not all(scale > 0 for scale in scales.tolist()):
        raise InputError(f"scales: expected positive ones, got {scales.tolist()}")
