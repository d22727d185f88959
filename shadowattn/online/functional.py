"""`sparse_attention`: the whole online stage for one layer's tensors, chunk by chunk."""

from dataclasses import replace

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.kernels import choose
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator, check_estimator_type
from shadowattn.online.estimators.base import check_place
from shadowattn.online.estimators.int8 import Int8
from shadowattn.online.executor import Threads, run_batched
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.plugins import needs_nothing, parts_of

# Those that can be made without a bank or anything else; INT8 without a bank measures its scales on the tensors.
_NAMED = {"int8": Int8} | {
    kind.short_name or name: kind
    for name, kind in parts_of("shadowattn.online.estimators", Estimator).items()
    if needs_nothing(kind)
}
ESTIMATORS = tuple(_NAMED)
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
    block_score: str = "leading_query",
    sinks: int = 0,
    recent: int = 0,
    min_budget: int = 1,
) -> Tensor:
    """Attention of every query row on the keys that an estimate ranks highest (section 3).

    q [H, Q, D]; k and v [G, K, D], all float32, bfloat16, float16 or float64 and summed in float32 (the last two by the torch
    kernels); row i stands at position causal_offset + i and sees the keys up to it.
    `retention` is a float or [H]; a row keeps max(min_budget, ceil(retention × visible)) keys, or all that it sees, ties to the
    lower index, and blocks of `query_block` rows share a list as `block_score` says (see `reference.select`, also for `sinks` and
    `recent`). `estimator` is an `Estimator` or one of `ESTIMATORS`: `int8` (INT8 products, scales taken from the
    tensors), which is `int8_fused` (by the native kernels; float32 and bfloat16 alone) where those serve the tensors, else
    `int8_graph` (the same integers by OpenVINO, by torch on a GPU); `oracle` and others.
    `kernel` is `native`, `torch` or `auto`, see `kernels.choose`. `scale` defaults to 1/√D. Returns [H, Q, D] in q's dtype;
    nothing larger than a chunk of rows by K is held. Raises `InputError` on any argument of a type, dtype, shape, device or range
    that does not fit, on NaN and infinity, and on tensors whose gradient would be lost.
    """
    causal_offset, scale = check_attention(q, k, v, causal_offset, scale)
    kernels = choose(kernel, head_dim=q.shape[2], dtype=q.dtype, device=q.device)
    rule = Rule(query_block, block_score, sinks, recent, min_budget)
    # A block is padded to its full height; one beyond the last row holds no more than that row's.
    rule = replace(rule, query_block=min(rule.query_block, max(2, q.shape[1])))
    estimator = estimator_of(estimator, q, k) if isinstance(estimator, str) else check_estimator_type(estimator)
    check_place(q.device, type(estimator))
    positions = torch.arange(causal_offset, causal_offset + q.shape[1], device=q.device)
    whole = Chunk.of(q, k, v, retention=retention, positions=positions, scale=scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for rows, chunk in whole.split(max(1, _CHUNK_TOKENS // rule.query_block) * rule.query_block):
        out[:, rows] = run_batched(Stages(chunk, Parts(estimator, rule, kernels)), threads=Threads(), keep_lists=False).out
    return out


def named_estimator(name: str, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> Estimator:
    """One of `ESTIMATORS` as it is by default, for such q and k; those with INT8 scales measure them, chunk by chunk."""
    return _kind(name, head_dim=head_dim, dtype=dtype, device=device)()


def estimator_of(estimator: str, q: Tensor, k: Tensor) -> Estimator:
    """The same for these tensors alone: INT8 scales are those of all of q [H, Q, D] and k [G, K, D], one for all chunks."""
    if estimator not in ESTIMATORS:
        raise InputError(f"estimator: expected one of {', '.join(ESTIMATORS)} or an Estimator, got {estimator!r}")
    return _kind(estimator, head_dim=q.shape[2], dtype=q.dtype, device=q.device).of(q, k)


def _kind(name: str, **of_tensors) -> type[Estimator]:
    return Int8.of_tensors(**of_tensors) if name == "int8" else _NAMED[name]


def check_attention(q: Tensor, k: Tensor, v: Tensor, causal_offset: int, scale: float | None) -> tuple[int, float]:
    """The offset and the scale of the softmax. Raises `InputError` where arguments are none that attention can be computed of."""
    checks.tensors(q=q, k=k, v=v)
    fits = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2] and 0 not in (*q.shape, *k.shape)
    if not fits or q.shape[0] % k.shape[0]:
        raise InputError(
            "expected q [H, Q, D], k and v [G, K, D], nothing empty, H a multiple of G; got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    checks.without_gradient(q=q, k=k, v=v)
    causal_offset = checks.causal_offset(causal_offset, rows=q.shape[1], keys=k.shape[1])
    scale = checks.softmax_scale(scale, q.shape[2])
    checks.finite_products(q, k, v, scale)
    return causal_offset, scale
