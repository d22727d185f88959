"""Estimate, select, attend: the whole path for one layer's tensors, chunk by chunk."""

from dataclasses import replace

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.budget import head_retentions
from shadowattn.errors import InputError
from shadowattn.kernels import Kernels, choose
from shadowattn.online.estimators import Chooser, Estimator, check_estimator_type, check_scores, logit_scales, using
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.random import Random
from shadowattn.online.estimators.streaming import Streaming
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, Lists, Selection

_NAMED = {"oracle": Oracle, "streaming": Streaming, "random": Random}
_FROM_TENSORS = {"int8": Int8Tensor.of, "int8_fused": Int8Fused.of}
ESTIMATORS = (*_FROM_TENSORS, *_NAMED)
_CHUNK_TOKENS = 256
# What one launch may hold. Heads go through in as many launches as that takes, so that memory does not grow with heads × rows ×
# keys; and lists that an estimator makes without scores should still be in the last-level cache when attention reads them.
_SCORE_BYTES, _LIST_BYTES = 64 << 20, 8 << 20


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
    sinks: int = 0,
    recent: int = 0,
) -> Tensor:
    """Attention of every query row on the keys that an estimate ranks highest (section 3).

    q [H, Q, D]; k and v [G, K, D], all float32, bfloat16, float16 or float64 and summed in float32 (the last two by the torch
    kernels); row i stands at position causal_offset + i and sees the keys up to it.
    `retention` is a float or [H]; a row keeps max(1, ceil(retention × visible)) keys, ties to the lower index, and
    blocks of `query_block` rows share a list as `block_score` says (see `reference.select`, also for `sinks` and
    `recent`). `estimator` is `int8` (INT8 products by OpenVINO, scales taken from the tensors), `int8_fused` (the same
    integers by the native kernels, no graph), `oracle`, `streaming`, `random`, or an `Estimator`; `kernel` is `native`,
    `torch` or `auto`, see `kernels.choose`. `scale` defaults to 1/√D. Returns [H, Q, D] in q's dtype; nothing larger
    than a chunk of rows by K is held. Raises `InputError` on any argument of a type, dtype, shape, device or range that does not
    fit, on NaN and infinity, and on tensors whose gradient would be lost.
    """
    _check(q, k, v)
    causal_offset = checks.causal_offset(causal_offset, rows=q.shape[1], keys=k.shape[1])
    scale = checks.softmax_scale(scale, q.shape[2])
    checks.finite_products(q, k, v, scale)
    kernels = choose(kernel, head_dim=q.shape[2], dtype=q.dtype)
    retention = head_retentions(retention, q.shape[0])
    rule = Rule(query_block, block_score, sinks, recent)
    # A block is padded to its full height; one beyond the last row holds no more than that row's.
    rule = replace(rule, query_block=min(rule.query_block, max(2, q.shape[1])))
    estimator = _named(estimator, q, k) if isinstance(estimator, str) else check_estimator_type(estimator)
    positions = causal_offset + torch.arange(q.shape[1])
    heads = Heads.all(q.shape[0], k.shape[0])
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for rows in torch.arange(q.shape[1]).split(max(1, _CHUNK_TOKENS // rule.query_block) * rule.query_block):
        chunk, at = slice(int(rows[0]), int(rows[-1]) + 1), positions[rows]
        seen = slice(0, int(at[-1]) + 1)
        out[:, chunk], _ = attend_chunk(
            q[:, chunk], k[:, seen], v[:, seen], retention, layer=0, positions=at, heads=heads, estimator=estimator,
            rule=rule, kernels=kernels, scale=scale, keep_lists=False,
        )  # fmt: skip
    return out


def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    retention: Tensor,
    *,
    layer: int,
    positions: Tensor,
    heads: Heads,
    estimator: Estimator,
    rule: Rule,
    kernels: Kernels,
    scale: float,
    keep_lists: bool,
) -> tuple[Tensor, Selection | int]:
    """One chunk of the heads `heads`: q [H, Q, D] at `positions` [Q], k and v [G, K, D] up to the last row's own key.

    Returns the output [H, Q, D] and what was selected: the lists where `keep_lists`, else how many (head, row, key) pairs.
    """
    out, parts, kept = torch.empty(q.shape, dtype=q.dtype), [], 0
    lists = rule.lists(retention, positions)
    with using(estimator):
        prepared = estimator.prepare(k, layer=layer) if isinstance(estimator, Chooser) else None
        for part in _launches(q, k, retention, estimator, rule):
            how = {"positions": positions, "heads": heads[part], "rule": rule, "lists": lists[part], "scale": scale}
            if isinstance(estimator, Chooser):
                selection = estimator.choose(q[part], prepared, **how)
            else:
                selection = select_keys(q[part], k, layer=layer, estimator=estimator, kernels=kernels, **how)
            out[part] = kernels.attend(q[part], k, v, selection, heads[part], scale=scale)
            kept += selection.kept()
            if keep_lists:
                parts.append(selection)
    return out, Selection.cat(parts) if keep_lists else kept


def select_keys(
    q: Tensor,
    k: Tensor,
    *,
    layer: int,
    positions: Tensor,
    heads: Heads,
    estimator: Estimator,
    rule: Rule,
    lists: Lists,
    kernels: Kernels,
    scale: float,
) -> Selection:
    """Scores, and by them `lists`, for one chunk: q [H, Q, D] of `heads` at `positions` [Q], k [G, K, D]."""
    scored, at = rule.scored(q, positions)
    with using(estimator):
        to_logits = logit_scales(estimator, rule, q, k, layer=layer, heads=heads, scale=scale)
        scores = estimator.estimate(scored, k, layer=layer, positions=at, heads=heads)
        check_scores(scores, estimator, heads=len(heads), rows=len(at), keys=k.shape[1])
        return kernels.select(rule.pool(scores, positions, to_logits), lists)


def _launches(q: Tensor, k: Tensor, retention: Tensor, estimator: Estimator, rule: Rule) -> list[slice]:
    """Runs of neighbouring heads that go through estimate, select and attend together."""
    heads, rows, _ = q.shape
    if rule.query_block > 1 and rule.pooling == "rows":
        rows = -(-rows // rule.query_block)
    row_bytes = 4 * rows * k.shape[1]
    if isinstance(estimator, Chooser):
        count = int(_LIST_BYTES / (row_bytes * float(retention.max())))
    else:
        count = _SCORE_BYTES // row_bytes
    count = max(1, count)
    return [slice(at, min(at + count, heads)) for at in range(0, heads, count)]


def _named(estimator: str, q: Tensor, k: Tensor) -> Estimator:
    if estimator not in ESTIMATORS:
        raise InputError(f"estimator: expected one of {', '.join(ESTIMATORS)} or an Estimator, got {estimator!r}")
    return _FROM_TENSORS[estimator](q, k) if estimator in _FROM_TENSORS else _NAMED[estimator]()


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    checks.tensors(q=q, k=k, v=v)
    fits = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2] and 0 not in (*q.shape, *k.shape)
    if not fits or q.shape[0] % k.shape[0]:
        raise InputError(
            "expected q [H, Q, D], k and v [G, K, D], nothing empty, H a multiple of G; got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    checks.without_gradient(q=q, k=k, v=v)
