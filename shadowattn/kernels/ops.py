"""The native kernels as torch operators, so that torch.compile and export see shapes instead of an opaque call.

`torch.ops.shadowattn.NAME`; each has a fake kernel that only says what the result looks like. Axes as in `shadowattn.types`.
"""

import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.kernels import native


@torch.library.custom_op("shadowattn::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_head: Tensor,
    positions: Tensor,
    indices: Tensor | None,
    starts: Tensor | None,
    query_block: int,
    scale: float,
) -> Tensor:
    """Attention of q [H, Q, D] on listed keys (or, without lists, on all up to each row's own); returns [H, Q, D]."""
    _check(q, k, v, kv_head)
    lists = -(-q.shape[1] // query_block)
    known = len(positions) == q.shape[1] and (starts is None or len(starts) == q.shape[0] * lists + 1)
    if not known or int(positions[-1]) >= k.shape[1]:
        raise InputError(
            f"expected a position below K = {k.shape[1]} for each of {q.shape[1]} rows, and starts [H·B + 1], got "
            f"{len(positions)} positions up to {int(positions[-1])} and {None if starts is None else len(starts)} starts"
        )
    out = torch.empty(q.shape, dtype=q.dtype)
    native.attend(
        _rows(q), _rows(k), _rows(v), out, kv_head=kv_head, positions=positions, indices=indices, starts=starts,
        query_block=query_block, scale=scale,
    )  # fmt: skip
    return out


@attend.register_fake
def _(q, k, v, kv_head, positions, indices, starts, query_block, scale):
    return q.new_empty(q.shape)


@torch.library.custom_op("shadowattn::select", mutates_args=())
def select(
    scores: Tensor, offered: Tensor, appended: Tensor, starts: Tensor, size: int, sinks: int, recent: int, self_first: bool
) -> Tensor:
    """Indices int32 [size] of all lists, from scores [H, B, K]; arguments as in `Lists`."""
    if scores.dtype not in (torch.float32, torch.int8):
        raise InputError(f"scores: expected float32 or int8, got {scores.dtype}")
    indices = torch.empty(size, dtype=torch.int32)
    native.select(
        _rows(scores),
        indices,
        offered=offered,
        appended=appended,
        starts=starts,
        sinks=sinks,
        recent=recent,
        self_first=self_first,
    )
    return indices


@select.register_fake
def _(scores, offered, appended, starts, size, sinks, recent, self_first):
    return scores.new_empty(size, dtype=torch.int32)


@torch.library.custom_op("shadowattn::pack", mutates_args=("packed",))
def pack(k: Tensor, scales: Tensor, packed: Tensor, first_key: int) -> None:
    """Quantises k [G, rows, D] by scales float32 [G] into `packed` uint8 [G, K / 16, D / 4, 16, 4], from `first_key` on."""
    _check_quantizable(k, packed)
    if first_key + k.shape[1] > packed.shape[1] * 16:
        raise InputError(f"packed: expected room for {first_key + k.shape[1]} keys, got {packed.shape[1] * 16}")
    native.pack(_rows(k), scales, packed, first_key)


@pack.register_fake
def _(k, scales, packed, first_key):
    return None


@torch.library.custom_op("shadowattn::estimate", mutates_args=())
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
    _check_quantizable(q, packed)
    _check_exponents(pooling, exponents, q)
    if -(-keys // 32) * 32 > packed.shape[1] * 16:
        raise InputError(f"packed: expected room for {-(-keys // 32) * 32} keys, whole steps of 32, got {packed.shape[1] * 16}")
    scores = torch.empty(q.shape[0], _lists(q, pooling, query_block), keys)
    native.estimate(
        _rows(q), q_scales, packed, keys=keys, kv_head=kv_head, visible=visible, pooling=pooling, query_block=query_block,
        exponents=exponents, scores=scores,
    )  # fmt: skip
    return scores


@estimate.register_fake
def _(q, q_scales, packed, keys, kv_head, visible, pooling, query_block, exponents=None):
    return q.new_empty(q.shape[0], _lists(q, pooling, query_block), keys, dtype=torch.float32)


@torch.library.custom_op("shadowattn::estimate_select", mutates_args=())
def estimate_select(
    q: Tensor,
    q_scales: Tensor,
    packed: Tensor,
    keys: int,
    kv_head: Tensor,
    visible: Tensor,
    pooling: str,
    query_block: int,
    offered: Tensor,
    appended: Tensor,
    starts: Tensor,
    size: int,
    sinks: int,
    recent: int,
    self_first: bool,
    exponents: Tensor | None = None,
) -> Tensor:
    """`estimate` and `select` in one pass, tile by tile: no score ever reaches memory. Returns indices int32 [size]."""
    _check_quantizable(q, packed)
    _check_exponents(pooling, exponents, q)
    if -(-keys // 32) * 32 > packed.shape[1] * 16:
        raise InputError(f"packed: expected room for {-(-keys // 32) * 32} keys, whole steps of 32, got {packed.shape[1] * 16}")
    indices = torch.empty(size, dtype=torch.int32)
    lists = {"offered": offered, "appended": appended, "starts": starts, "indices": indices}
    native.estimate(
        _rows(q), q_scales, packed, keys=keys, kv_head=kv_head, visible=visible, pooling=pooling, query_block=query_block,
        exponents=exponents, lists=lists | {"sinks": sinks, "recent": recent, "self_first": self_first},
    )  # fmt: skip
    return indices


@estimate_select.register_fake
def _(
    q, q_scales, packed, keys, kv_head, visible, pooling, query_block, offered, appended, starts, size, sinks, recent, self_first,
    exponents=None,
):  # fmt: skip
    return q.new_empty(size, dtype=torch.int32)


def _lists(q: Tensor, pooling: str, query_block: int) -> int:
    return q.shape[1] if pooling == "rows" else -(-q.shape[1] // query_block)


def _rows(x: Tensor) -> Tensor:
    """x with a contiguous last axis; caches and their slices have one and are not copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor, kv_head: Tensor) -> None:
    fits = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2] and len(kv_head) == q.shape[0]
    if not fits or q.dtype != k.dtype or k.dtype != v.dtype or q.dtype not in (torch.float32, torch.bfloat16):
        raise InputError(
            "expected q [H, Q, D], k and v [G, K, D], all float32 or all bfloat16, and kv_head [H]; got "
            f"{list(q.shape)} {q.dtype}, {list(k.shape)} {k.dtype}, {list(v.shape)} {v.dtype}, {list(kv_head.shape)}"
        )
    if q.shape[2] % 8 or not 0 < q.shape[2] <= 256 or q.device.type != "cpu":
        raise InputError(
            f"native attention: expected a head dimension that is a multiple of 8 up to 256, on the CPU, got {q.shape[2]} on "
            f"{q.device}; choose kernel=torch"
        )


def _check_exponents(pooling: str, exponents: Tensor | None, q: Tensor) -> None:
    if pooling == "probability" and (exponents is None or exponents.dtype != torch.float32 or exponents.shape != q.shape[:1]):
        raise InputError(f"exponents: expected float32 [{q.shape[0]}] where rows are pooled by probability, got {exponents}")


def _check_quantizable(x: Tensor, packed: Tensor) -> None:
    dim = x.shape[-1]
    if x.dtype not in (torch.float32, torch.bfloat16) or dim % 8 or not 0 < dim <= 256 or packed.shape[2] * 4 != dim:
        raise InputError(
            "native estimate: expected float32 or bfloat16, a head dimension that is a multiple of 8 up to 256, and keys packed "
            f"for it, got {x.dtype} and {dim}, packed for {packed.shape[2] * 4}; use estimator=int8"
        )
