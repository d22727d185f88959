"""Estimate, select, attend: the whole path for one layer's tensors, chunk by chunk."""

import torch
from torch import Tensor

from shadowattn.budget import head_retentions
from shadowattn.errors import InputError
from shadowattn.online.attention import attend
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.random import Random
from shadowattn.online.estimators.streaming import Streaming
from shadowattn.online.selection import scored_rows, select
from shadowattn.types import Selection

KERNELS = ("auto", "torch")
_CHUNK_TOKENS = 256


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    retention: float | Tensor,
    *,
    causal_offset: int,
    estimator: str | Estimator = "int8",
    query_block: int = 1,
    kernel: str = "auto",
    scale: float | None = None,
    block_score: str = "first_row",
) -> Tensor:
    """Attention of every query row on the keys that an estimate ranks highest (section 3).

    q [H, Q, D]; k and v [G, K, D], float32 or bfloat16; row i stands at position causal_offset + i and sees the keys up to it.
    `retention` is a float or [H]; a row keeps max(1, ceil(retention × visible)) keys, ties to the lower index, and
    blocks of `query_block` rows share a list as `block_score` says (see `reference.select`). `estimator` is
    `int8` (INT8 products by OpenVINO, scales taken from the tensors), `oracle`, `streaming`, `random`, or an
    `Estimator`. `scale` defaults to 1/√D. Returns [H, Q, D] in q's dtype; nothing larger than a chunk of rows by K is held.
    Raises `InputError` on shapes, retentions or values that do not fit; NaN and infinity are refused.
    """
    _check(q, k, v, causal_offset, kernel)
    retention = head_retentions(retention, q.shape[0])
    estimator = _named(estimator, q, k) if isinstance(estimator, str) else estimator
    positions = causal_offset + torch.arange(q.shape[1])
    chunk_tokens = max(1, _CHUNK_TOKENS // query_block) * query_block if query_block > 0 else 1
    parts = []
    for rows in torch.arange(q.shape[1]).split(chunk_tokens):
        chunk, at = q[:, rows], positions[rows]
        selection = select_keys(
            chunk,
            k,
            retention,
            layer=0,
            positions=at,
            estimator=estimator,
            query_block=query_block,
            block_score=block_score,
        )
        parts.append(attend(chunk, k, v, selection, scale=scale))
    return torch.cat(parts, 1)


def select_keys(
    q: Tensor,
    k: Tensor,
    retention: Tensor,
    *,
    layer: int,
    positions: Tensor,
    estimator: Estimator,
    query_block: int,
    block_score: str,
) -> Selection:
    """Estimate and select for one chunk: q [H, Q, D] at `positions` [Q], k [G, K, D], retention float64 [H]."""
    k = k[:, : int(positions[-1]) + 1]
    rows = scored_rows(q.shape[1], query_block, block_score)
    scores = estimator.estimate(q[:, rows], k, layer=layer, positions=positions[rows])
    return select(scores, retention, positions, query_block=query_block, block_score=block_score)


def _named(estimator: str, q: Tensor, k: Tensor) -> Estimator:
    named = {"oracle": Oracle, "streaming": Streaming, "random": Random}
    if estimator == "int8":
        return Int8Tensor.of(q, k)
    if estimator not in named:
        raise InputError(f"estimator: expected int8, {', '.join(named)} or an Estimator, got {estimator!r}")
    return named[estimator]()


def _check(q: Tensor, k: Tensor, v: Tensor, causal_offset: int, kernel: str) -> None:
    if kernel not in KERNELS:
        raise InputError(f"kernel: expected one of {', '.join(KERNELS)}, got {kernel!r}")
    fits = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2] and 0 not in (*q.shape, *k.shape)
    if not fits or q.shape[0] % k.shape[0]:
        raise InputError(
            "expected q [H, Q, D], k and v [G, K, D], nothing empty, H a multiple of G; got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if not 0 <= causal_offset <= k.shape[1] - q.shape[1]:
        raise InputError(
            f"causal_offset: expected 0 … K − Q = {k.shape[1] - q.shape[1]}, so that every row's own key exists, "
            f"got {causal_offset}"
        )
    if not all(torch.isfinite(x).all() for x in (q, k, v)):
        raise InputError("expected finite q, k and v, got NaN or infinity; a ranking of keys would mean nothing")
