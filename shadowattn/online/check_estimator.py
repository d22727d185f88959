"""Whether an estimator keeps its contract: shape, dtype, finite scores, no later token in an earlier row's ranking, determinism.

The tensors are made so that all chunks have one range: every row of Q, and the first key of K, hold the largest value.
Static INT8 scales, which are chosen by a chunk's range, then stay what they are. That choice is the one thing that an estimator
may let depend on a chunk as a whole, later tokens included, and so it is no fault here.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.kernels import TorchKernels
from shadowattn.online.cache import LayerCache
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator, check_estimator_type, check_scores
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, Selection

# Share of a row's largest score that two ways of summation may differ by; closer scores may come in either order.
_ROUNDING = 1e-4
# Keys that an estimator puts before all others score this or more (`estimators.pages.ALWAYS`).
_FORCED = 1e20
_LARGEST = 6.0
_RETENTION = 0.3
_LONGER = 300


def check_estimator(
    estimator: Estimator,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    rows: int = 16,
    keys: int = 36,
    layer: int = 0,
    rule: Rule | None = None,
    seed: int = 0,
) -> None:
    """Raises `InputError`, with the reason, where an estimator breaks what `Estimator` promises.

    Random q [heads, rows, head_dim] and k [kv_heads, keys, head_dim], a chunk of an even number of `rows` at the end of `keys`,
    are estimated in several ways; without a bank once more at the end of 300 keys, since blocks of many keys hide what they look
    at. Scores are float32, float16 or int8 [H, Q, K] and finite; inputs are left as they were; the same input
    gives the same scores; and a row ranks the keys that it sees the same way whatever tokens come later, whether its chunk comes
    whole or in halves, with what it derived from the keys of the first half, and whichever heads it comes with. One that `sees`
    earlier rows may rank otherwise in halves, and one that sees its chunk also when later tokens change. Of an estimator
    that `selects`, the lists that it makes for `rule` are held to the same. A bank's estimator needs a shape that its bank was
    built for, and all heads in one scale bucket or several: which bucket serves a chunk may depend on later tokens, and is held
    fixed here.
    """
    check_estimator_type(estimator)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rows": rows, "keys": keys}
    heads, kv_heads, head_dim, rows, keys = (checks.integer(name, value, least=1) for name, value in sizes.items())
    layer, seed = checks.integer("layer", layer), checks.integer("seed", seed)
    rule = Rule() if rule is None else rule
    checks.instance("rule", rule, Rule, "make one with shadowattn.online.selection.Rule(query_block, …)")
    if heads % kv_heads or rows % 2 or keys <= rows:
        raise InputError(f"check_estimator: expected heads a multiple of kv_heads, rows even and fewer than keys, got {sizes}")
    if estimator.selects and rows % (2 * rule.query_block):
        raise InputError(f"check_estimator: expected rows of whole blocks in both halves, got {rows} and {rule.query_block}")
    step = rule.query_block if estimator.selects else 1
    rank = partial(_chosen, estimator, rule) if estimator.selects else partial(_scored, estimator)
    _check(rank, *_tensors(heads, kv_heads, head_dim, rows, keys, seed), estimator, range(step, rows, step), layer)
    if estimator.graphs is None and keys < _LONGER:
        _check(rank, *_tensors(heads, kv_heads, head_dim, rows, _LONGER, seed), estimator, (rows // 2,), layer)


Rank = Callable[[Chunk], Tensor]
"""What ranks the keys of each row of a chunk, [h, rows, K], larger first; −∞ for keys not seen."""


def _check(rank: Rank, q: Tensor, k: Tensor, estimator: Estimator, cuts: Iterable[int], layer: int) -> None:
    """`cuts`: the rows from which on tokens are changed."""
    name, chunk = type(estimator).__name__, partial(Chunk.of, layer=layer)
    (count, rows, _), (groups, keys, _) = q.shape, k.shape
    heads = Heads.all(count, groups)
    q_before, k_before = q.clone(), k.clone()
    whole = rank(chunk(q, k))
    if not (q.equal(q_before) and k.equal(k_before)):
        raise InputError(f"{name}: it changed q or k; work on a copy of them")
    if not rank(chunk(q, k)).equal(whole):
        raise InputError(f"{name}: the same input gave other scores the second time; seed what is random, and keep no state")
    for first in cuts if estimator.sees != "chunk" else ():
        for flipped in (True, False):
            later_q, later_k = _with_another_end(q, k, first, flipped)
            moved = _moved(whole[:, :first], rank(chunk(later_q, later_k))[:, :first])
            if moved is not None:
                raise InputError(
                    f"{name}: not causal: row {moved} at position {keys - rows + moved} ranks its keys otherwise when tokens "
                    f"from position {keys - rows + first} on change; let a key's score depend on no key or query after the "
                    "row, or say so: sees = 'chunk'"
                )
    half = rows // 2
    cache = LayerCache()
    parts = [
        rank(chunk(q[:, :half], k[:, : keys - half], cache=cache)),
        rank(chunk(q[:, half:], k, cache=cache)),
    ]
    parts[0] = torch.nn.functional.pad(parts[0], (0, half), value=-torch.inf)
    if estimator.sees == "row" and (moved := _moved(whole, torch.cat(parts, 1))) is not None:
        raise InputError(
            f"{name}: it depends on the chunk length: row {moved} ranks its keys otherwise in a chunk of {half} rows than in one "
            f"of {rows}; let a row's scores depend on that row, its position and the keys alone, and what you derive from keys "
            "grow with them; or say so: sees = 'earlier_rows'"
        )
    swapped = torch.arange(count).view(groups, -1).flip(1).flatten()
    for which in (swapped, *torch.arange(count).split(1), torch.arange(count)[:: max(1, count // groups)]):
        if (moved := _moved(whole[which], rank(chunk(q[which], k, heads=heads[which], layer_q=q)))) is not None:
            raise InputError(
                f"{name}: it depends on the order of heads: row {moved} ranks its keys otherwise when heads {which.tolist()} "
                "come together; go by `heads.ids` and `heads.kv`, not by a head's place in q"
            )


def _scored(estimator: Estimator, chunk: Chunk) -> Tensor:
    with estimator.use():
        scores = check_scores(estimator.scores(chunk), estimator, chunk).float().clone()
    if not scores.isfinite().all():  # of a class that says they are
        raise InputError(f"scores of {type(estimator).__name__}: got NaN or infinity; correct the estimator")
    return _seen(scores, chunk)


def _chosen(estimator: Estimator, rule: Rule, chunk: Chunk) -> Tensor:
    chunk = replace(chunk, retention=torch.full_like(chunk.retention, _RETENTION))
    with estimator.use():
        selection = estimator.select(chunk, rule, rule.lists(chunk.retention, chunk.positions), TorchKernels())
    name = type(estimator).__name__
    return _seen(_members(selection, name, len(chunk.heads), chunk.positions, chunk.keys, rule).float(), chunk)


def _seen(ranks: Tensor, chunk: Chunk) -> Tensor:
    return ranks.masked_fill(torch.arange(chunk.keys) > chunk.positions[:, None], -torch.inf)


def _members(selection: Selection, name: str, heads: int, positions: Tensor, keys: int, rule: Rule) -> Tensor:
    """Whether a list holds a key, bool [h, rows, K]. Raises `InputError` where lists are not as `Selection` says."""
    checks.instance(f"lists of {name}", selection, Selection, "return a shadowattn.types.Selection")
    blocks = -(-len(positions) // rule.query_block)
    checks.vector("indptr", selection.indptr, heads * blocks + 1)
    checks.vector("indices", selection.indices, selection.indices.numel(), dtype=torch.int32)
    lengths = selection.indptr.diff()
    if int(selection.indptr[0]) or int(selection.indptr[-1]) != len(selection.indices) or int(lengths.min()) < 1:
        raise InputError(f"lists of {name}: expected indptr that rise from 0 to {len(selection.indices)}, a key or more a list")
    of_list = torch.arange(heads * blocks).repeat_interleave(lengths)
    indices = selection.indices.long()
    if int(indices.min()) < 0 or int(indices.max()) >= keys or not bool(((of_list * keys + indices).diff() > 0).all()):
        raise InputError(f"lists of {name}: expected keys of 0 … {keys - 1}, ascending in each list and none twice")
    held = torch.zeros(heads * blocks, keys, dtype=torch.bool)
    held[of_list, indices] = True
    return held.view(heads, blocks, keys).repeat_interleave(rule.query_block, 1)[:, : len(positions)]


def _moved(before: Tensor, after: Tensor) -> int | None:
    """The first row that ranks two keys otherwise, by more than rounding, in scores [h, rows, K]."""
    gaps = []
    for scores in (before, after):
        seen = scores.isfinite()
        ranked = seen & (scores.abs() < _FORCED)  # the others' size says nothing of how these are rounded
        highest, lowest = (scores.masked_fill(~ranked, end).amax(-1) for scores, end in ((scores, -_FORCED), (-scores, -_FORCED)))
        rounding = torch.where(ranked.any(-1), _ROUNDING * (highest + lowest) + 1e-6 * highest.abs().maximum(lowest.abs()), 0.0)
        scores = scores.masked_fill(~seen, 0.0)
        both = seen[..., :, None] & seen[..., None, :]
        larger = scores.abs()[..., :, None].maximum(scores.abs()[..., None, :])
        gap = (scores[..., :, None] - scores[..., None, :]).masked_fill(~both, 0.0)
        gaps.append((gap, rounding[..., None, None] + 1e-6 * larger))
    (was, was_rounding), (is_now, is_rounding) = gaps
    otherwise = (was > was_rounding) & (is_now <= 0) | (is_now > is_rounding) & (was <= 0)
    rows = otherwise.any(-1).any(-1).any(0).nonzero()
    return int(rows[0]) if len(rows) else None


def _tensors(heads: int, kv_heads: int, head_dim: int, rows: int, keys: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, rows, head_dim, generator=generator).clamp(-_LARGEST, _LARGEST)
    k = torch.randn(kv_heads, keys, head_dim, generator=generator).clamp(-_LARGEST, _LARGEST)
    q[:, :, 0], k[:, 0, 0] = _LARGEST, _LARGEST
    return q / (1 + torch.arange(heads) % 3)[:, None, None], k  # heads of several ranges


def _with_another_end(q: Tensor, k: Tensor, first: int, flipped: bool) -> tuple[Tensor, Tensor]:
    """q and k with other tokens from row `first` on, of the same range: of the other sign, or shuffled, with longer keys."""
    q, k, rows = q.clone(), k.clone(), q.shape[1]
    later_k = k[:, k.shape[1] - rows + first :]
    if flipped:
        q[:, first:] *= -1
        later_k *= -1
    else:
        q[:, first:, 1:] = q[:, first:, 1:].flip(-1)
        later_k.copy_((2 * later_k.roll(1, -1)).clamp(-_LARGEST, _LARGEST))
    return q, k
