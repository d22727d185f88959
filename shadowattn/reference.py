"""The specification, in plain float32 torch: what every fast path must compute.

Written to be read and believed, not to be fast: it holds whole [Q, K] score matrices, and works them off row by row.
The fast paths are tested against it and never import it.
"""

import math

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.budget import head_retentions, keep_counts, key_block_counts, shared_keep_counts
from shadowattn.errors import InputError


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, causal_offset: int, scale: float | None = None) -> Tensor:
    """Causal softmax attention.

    q [H, Q, D]; k and v [G, K, D], query head h reading key head h // (H / G). Query row i sees the keys
    0 … causal_offset + i; `scale` defaults to 1/√D. Any floating dtypes. Returns float32 [H, Q, D]. Raises `InputError` on any
    argument of a type, dtype, shape, device or range that does not fit.
    """
    scores, visible = _scores(q, k, v, causal_offset)
    scale = _scale(q, k, v, scale)
    heads, rows, keys = scores.shape
    seen = torch.arange(keys)[None, :] < visible[:, None]
    return _attend(q, scores, v, seen.expand(heads, rows, keys), scale)


def topk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    retention: float | Tensor,
    *,
    causal_offset: int,
    query_block: int = 1,
    scale: float | None = None,
    block_score: str = "leading_query",
    sinks: int = 0,
    recent: int = 0,
    min_budget: int = 1,
) -> Tensor:
    """Attention on the exact top-k keys by q·k (section 2.2; Eq. of C/G-Sparse with an exact estimate).

    Shapes as in `dense_attention`; `retention` is a float or [H]. With `query_block` 1 every row keeps its own
    max(min_budget, ceil(retention × visible)) keys, or all that it sees, ties to the lower index. Larger blocks share one list,
    see `select`.
    """
    scores, visible = _scores(q, k, v, causal_offset)
    scale = _scale(q, k, v, scale)
    retentions = head_retentions(retention, q.shape[0])
    selected = select(scores, retentions, visible, query_block, block_score, sinks, recent, min_budget, scale=scale)
    return _attend(q, scores, v, selected, scale)


def int8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal_offset: int,
    q_step: Tensor,
    k_step: Tensor,
    v_step: Tensor,
    score_step: Tensor | None,
    probabilities: str = "linear",
    scale: float | None = None,
) -> Tensor:
    """Causal softmax attention in static INT8 (NPU-Full, table 3): every key attends, and what the device holds is rounded.

    Shapes as in `dense_attention`; a step is the real value of one integer, float32 [H] of q and of scores, [G] of k and v.
    Q, K and V are round(x / step), half to even, clipped to ±127; so is the product q·k, where `score_step` is given. Softmax is
    in float, over the keys that a row sees. Its probabilities are rounded to steps of 1/127 (`linear`), to the power of two whose
    exponent is nearest to their logarithm, 0 below 2⁻¹²⁷ (`log2`), or not at all (`float`). Returns float32 [H, Q, D].
    """
    _, visible = _scores(q, k, v, causal_offset)
    scale = _scale(q, k, v, scale)
    heads, rows, dim = q.shape
    out = torch.zeros(heads, rows, dim)
    for head in range(heads):
        group = head * len(k) // heads
        q8, k8, v8 = (
            _int8(x, float(step)) for x, step in ((q[head], q_step[head]), (k[group], k_step[group]), (v[group], v_step[group]))
        )
        for row in range(rows):
            seen = int(visible[row])
            score = (q8[row] @ k8[:seen].T) * (q_step[head] * k_step[group])
            if score_step is not None:
                score = _int8(score, float(score_step[head])) * score_step[head]
            p = torch.softmax(score * scale, -1)
            if probabilities == "linear":
                p = torch.round(p * 127) / 127
            elif probabilities == "log2":
                exponent = torch.round(-torch.log2(p))
                p = torch.where(exponent <= 127, 2.0**-exponent, 0.0)
            out[head, row] = p @ (v8[:seen] * v_step[group])
    return out


def _int8(x: Tensor, step: float) -> Tensor:
    """Integers −127 … 127 as float32."""
    return torch.round(x.float() / step).clamp(-127, 127)


def select(
    scores: Tensor,
    retention: Tensor,
    visible: Tensor,
    query_block: int,
    block_score: str,
    sinks: int = 0,
    recent: int = 0,
    min_budget: int = 1,
    *,
    scale: float = 1.0,
) -> Tensor:
    """The keys each row keeps, bool [H, Q, K], for scores [H, Q, K], retention [H] and visible [Q].

    A row's budget is max(min_budget, ceil(retention × visible)) keys, or all that it sees (`budget.keep_counts`). Within it the
    row's own key comes first where there is a recent window, then the first `sinks` keys, then the window's other keys, the
    nearest first: the `recent` last keys of the row, its own among them. All others follow by score.

    A block of `query_block` rows, two or more, shares one list. The list holds the block's own keys, of which a row uses those
    up to itself, and `budget.shared_keep_counts` keys before the block, ranked as above with the window of the block's first
    row. Their scores come from the rows in one of five ways:

    `leading_query`: the scores of the block's first row. No row's selection depends on a later token.
    `pooled_query`: the scores of the block's mean query, which are the mean over the block's rows.
    `max`, `sum`: the largest score, or the sum, over the rows of the block.
    `probability`: the sum over the rows of softmax(score · scale), each row over the keys that it sees. Unlike raw scores, which
    rows of different scale dominate, it is the attention that the block is estimated to pay to a key.
    With the last four a token may change which keys the earlier rows of its own block keep; never anything in earlier blocks.
    """
    query_block, sinks, recent, min_budget = _check_selection(
        scores, retention, visible, query_block, block_score, sinks, recent, min_budget, scale
    )
    heads, rows, keys = scores.shape
    selected = torch.zeros(heads, rows, keys, dtype=torch.bool)
    key = torch.arange(keys)
    for head in range(heads):
        for start in range(0, rows, query_block):
            block = slice(start, min(start + query_block, rows))
            first = int(visible[block][0])
            seen = key[None, :] < visible[block][:, None]
            if query_block == 1:
                keep = keep_counts(retention[head : head + 1], visible[block], min_budget)
                ranking = _ranking(scores[head, start, :first], sinks, min(recent, 1), recent - 1)
            else:
                keep = shared_keep_counts(retention[head : head + 1], visible[block], query_block, min_budget)
                pooled = _list_scores(scores[head, block], seen, block_score, scale)
                ranking = _ranking(pooled[: first - 1], sinks, 0, recent - 1)
                selected[head, block, first - 1 :] = True
            selected[head, block, ranking[: int(keep)]] = True
            selected[head, block] &= seen
    return selected


def _ranking(scores: Tensor, sinks: int, newest: int, before: int) -> list[int]:
    """Keys, the most important first, for `scores` [keys]; equal scores go to the lower index.

    The last `newest` keys, then the first `sinks`, then the `before` keys before the newest, then all others by score.
    """
    last = len(scores) - newest
    window = [*range(last, len(scores)), *range(min(sinks, last)), *range(last - 1, max(-1, last - 1 - before), -1)]
    by_score = torch.sort(scores, descending=True, stable=True).indices.tolist()
    return list(dict.fromkeys([*window, *by_score]))


def select_key_blocks(
    scores: Tensor, retention: Tensor, visible: Tensor, query_block: int, key_block: int, min_budget: int = 1
) -> Tensor:
    """The keys each row keeps where keys come in blocks of `key_block`, bool [H, Q, K]; other arguments as in `select`.

    A block of keys scores the largest score in it, over the rows of the list that see the key. Of a list's budget come
    ceil(budget / key_block) blocks, ties to the first, and for a row's own list as many as hold its least budget
    (`budget.key_block_counts`). Where rows share a list, the blocks that hold any of their own keys
    are always in, and those that end before them compete for the rest. A row keeps what it sees of them.
    """
    query_block, _, _, min_budget = _check_selection(scores, retention, visible, query_block, "max", 0, 0, min_budget, 1.0)
    key_block = checks.integer("key_block", key_block, least=1)
    heads, rows, keys = scores.shape
    selected = torch.zeros(heads, rows, keys, dtype=torch.bool)
    key = torch.arange(keys)
    for head in range(heads):
        for start in range(0, rows, query_block):
            block = slice(start, min(start + query_block, rows))
            seen = key[None, :] < visible[block][:, None]
            first, last = int(visible[block][0]), int(visible[block][-1])
            best = scores[head, block].masked_fill(~seen, -math.inf).amax(0)
            ranked = torch.nn.functional.pad(best, (0, -keys % key_block), value=-math.inf).view(-1, key_block).amax(1)
            if query_block > 1:
                budget = shared_keep_counts(retention[head : head + 1], visible[block], query_block, min_budget)
                competing, count = (first - 1) // key_block, -(-int(budget) // key_block)
            else:
                budget = keep_counts(retention[head : head + 1], visible[block], min_budget)
                competing, count = len(ranked), int(key_block_counts(budget, visible[block], key_block, min_budget))
            chosen = torch.zeros(len(ranked), dtype=torch.bool)
            chosen[_ranking(ranked[:competing], 0, 0, 0)[:count]] = True
            chosen[competing : -(-last // key_block)] = True
            selected[head, block] = chosen.repeat_interleave(key_block)[:keys] & seen
    return selected


def _list_scores(scores: Tensor, seen: Tensor, block_score: str, scale: float) -> Tensor:
    """What a list ranks its keys by, [K], for the scores [rows, K] of its rows and which keys each of them sees."""
    if block_score == "leading_query":
        return scores[0]
    if block_score == "max":
        return scores.masked_fill(~seen, -math.inf).amax(0)
    if block_score == "sum":
        return scores.double().masked_fill(~seen, 0).sum(0).float()
    if block_score == "pooled_query":
        return scores.double().mean(0).float()
    if block_score == "probability":
        return torch.softmax((scores.double() * scale).masked_fill(~seen, -math.inf), 1).sum(0).float()
    raise InputError(f"block_score: expected leading_query, pooled_query, max, sum or probability, got {block_score!r}")


def _scores(q: Tensor, k: Tensor, v: Tensor, causal_offset: int) -> tuple[Tensor, Tensor]:
    """Unscaled q·k, float32 [H, Q, K], and the number of visible keys of every row, int64 [Q]."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.tensors(**{name: x})  # each of a floating dtype of its own: all become float32
        checks.placed(checks.CPU, **{name: x})
    shapes = [list(x.shape) for x in (q, k, v)]
    if any(len(shape) != 3 or 0 in shape for shape in shapes) or shapes[0][0] % shapes[1][0] or shapes[0][2] != shapes[1][2]:
        raise InputError(f"expected q [H, Q, D], k and v [G, K, D], nothing empty, H a multiple of G, got {shapes}")
    if shapes[1][:2] != shapes[2][:2]:
        raise InputError(f"expected v of as many heads and keys as k, got {shapes[1]} and {shapes[2]}")
    (heads, rows, _), (groups, keys, _) = q.shape, k.shape
    causal_offset = checks.causal_offset(causal_offset, rows=rows, keys=keys)
    k = k.float().repeat_interleave(heads // groups, 0)
    return q.float() @ k.transpose(1, 2), causal_offset + 1 + torch.arange(rows)


def _scale(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> float:
    """1/√D for None. Raises `InputError` on one that has no meaning, and on values that leave float32."""
    scale = checks.softmax_scale(scale, q.shape[2])
    checks.finite_products(q, k, v, scale)
    return scale


def _check_selection(
    scores: Tensor,
    retention: Tensor,
    visible: Tensor,
    query_block: int,
    block_score: str,
    sinks: int,
    recent: int,
    min_budget: int,
    scale: float,
) -> tuple[int, int, int, int]:
    checks.tensors((torch.float32, torch.float64), scores=scores)
    checks.placed(checks.CPU, scores=scores)
    if scores.dim() != 3 or 0 in scores.shape or scores.isnan().any():
        raise InputError(f"scores: expected [H, Q, K] without NaN, nothing empty, got {list(scores.shape)} or NaN")
    heads, rows, keys = scores.shape
    checks.tensors(retention=retention)
    checks.vector("retention", retention, heads, dtype=retention.dtype)
    head_retentions(retention, heads)
    checks.vector("visible", visible, rows)
    checks.ascending("visible", visible, least=1, below=keys + 1)
    checks.one_of("block_score", block_score, ("leading_query", "pooled_query", "max", "sum", "probability"))
    if checks.number("scale", scale) <= 0 or (block_score == "probability" and not bool(scores.isfinite().all())):
        raise InputError(f"expected a positive scale, and finite scores for probabilities, got scale={scale} or infinite scores")
    sizes = ("query_block", query_block, 1), ("sinks", sinks, 0), ("recent", recent, 0), ("min_budget", min_budget, 1)
    return tuple(checks.integer(name, value, least=least) for name, value, least in sizes)


def _attend(q: Tensor, scores: Tensor, v: Tensor, selected: Tensor, scale: float) -> Tensor:
    heads = q.shape[0]
    weights = torch.softmax((scores * scale).masked_fill(~selected, -math.inf), -1)
    return weights @ v.float().repeat_interleave(heads // v.shape[0], 0)
