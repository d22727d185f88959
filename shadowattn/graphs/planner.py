"""Which shapes to build: as little padding as a limit on the number of graphs allows, for the lengths that will come.

A launch computes its graph's whole rows × keys, whatever it needs of them; what is not needed is padding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shadowattn.budget import keep_counts, key_block_counts
from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape

POLICIES = ("planned", "powers", "multiples", "single")


@dataclass(frozen=True)
class ShapePlan:
    """Capacities, and the share of all scores computed for the expected lengths that nobody needs."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    waste: float
    policy: str


def chunk_lengths(prompt_tokens: Sequence[int], chunk_tokens: int) -> Counter[tuple[int, int]]:
    """(rows, keys) of every chunk of prompts of these lengths, and how often each occurs."""
    if chunk_tokens < 1 or not prompt_tokens or min(prompt_tokens) < 1:
        raise InputError(f"expected prompts and chunks of at least one token, got {list(prompt_tokens)} in {chunk_tokens}")
    lengths = Counter()
    for tokens in prompt_tokens:
        for start in range(0, tokens, chunk_tokens):
            end = min(start + chunk_tokens, tokens)
            lengths[end - start, end] += 1
    return lengths


def plan_capacities(
    lengths: Counter[tuple[int, int]], *, context_tokens: int, limit: int, policy: str = "planned", step: int = 1
) -> ShapePlan:
    """At most `limit` capacities (rows × keys) for launches of these `lengths`.

    The largest always serves the tallest chunk on `context_tokens` keys. `single` builds that one alone; `powers` doubles keys
    from one chunk on, `multiples` spaces them evenly, both for one height; `planned` finds the rows and keys of least waste.
    Capacities are rounded up to multiples of `step`, for graphs that pool blocks.
    """
    if policy not in POLICIES:
        raise InputError(f"graphs.shapes: expected one of {', '.join(POLICIES)}, got {policy!r}")
    if limit < 1:
        raise InputError(f"graphs.limit: expected room for at least one shape, got {limit}")
    height = _up(max(rows for rows, _ in lengths), step)
    longest = _up(max(context_tokens, max(keys for _, keys in lengths)), step)
    if policy == "planned":
        return _least_waste(lengths, height, longest, limit, step)
    if policy == "single":
        keys = [longest]
    elif policy == "multiples":
        count = min(limit, -(-longest // height))
        keys = [_up(-(-longest * (i + 1) // count), step) for i in range(count)]
    else:
        keys = [height]
        while keys[-1] < longest:
            keys.append(min(2 * keys[-1], longest))
        keys = keys[-limit:]
    return _plan(lengths, (height,), tuple(sorted({min(k, longest) for k in keys})), policy)


def launch_sizes(launch_heads: Sequence[int], *, heads: int, kv_heads: int, fold: bool = True) -> list[int]:
    """The numbers of heads that may share a launch, as far as the model has them; with folding, heads of one key head."""
    if not launch_heads or min(launch_heads) < 1:
        raise InputError(f"launch_heads: expected at least one number of heads, each at least 1, got {list(launch_heads)}")
    most = heads // kv_heads if fold and kv_heads < heads else heads
    return sorted({min(count, most) for count in launch_heads})


def plan_shapes(
    plan: ShapePlan,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    launch_heads: Sequence[int],
    fold: bool = True,
    shared_bytes: float = 48 << 20,
) -> tuple[GraphShape, ...]:
    """A graph shape for each of the plan's capacities and each number of heads that may share a launch.

    More than the least number share one on no more keys than leave a launch of the plan's most rows in `shared_bytes`, since the
    inputs and outputs of every graph count, whichever runs. `fold`: with GQA, the heads of a launch read one key head, which is
    passed once; else every head brings its own copy.
    """
    folded, sizes = fold and kv_heads < heads, launch_sizes(launch_heads, heads=heads, kv_heads=kv_heads, fold=fold)
    shapes = [
        GraphShape(count, rows, head_dim, keys, count if folded else 1)
        for count in sizes
        for rows in plan.rows
        for keys in plan.keys
    ]
    return tuple(shape for shape in shapes if shape.heads == sizes[0] or _bytes(shape, max(plan.rows)) <= shared_bytes)


def _bytes(shape: GraphShape, rows: int) -> int:
    """Of the keys that a launch takes and the scores of `rows` rows that it makes, in float32."""
    return 4 * shape.keys * (shape.kv_heads * shape.head_dim + shape.heads * rows)


def with_top_k(
    shapes: Sequence[GraphShape], shares: Sequence[float], *, key_block: int = 1, min_budget: int = 1
) -> tuple[GraphShape, ...]:
    """The same shapes for graphs that return indices: for each share of the keys the k that holds so many (blocks of) keys.

    Or of the least budget of a row, if it is more.
    """
    wanted, sized = torch.tensor(sorted(set(shares)), dtype=torch.float64), []
    for shape in shapes:
        keys = torch.tensor([shape.keys])
        budgets = keep_counts(wanted, keys, min_budget).unique()
        sized += [replace(shape, top_k=count) for count in key_block_counts(budgets, keys, key_block, min_budget).tolist()]
    return tuple(sized)


def _least_waste(lengths: Counter[tuple[int, int]], height: int, longest: int, limit: int, step: int) -> ShapePlan:
    """For every number of heights: the best heights for the keys and the best keys for the heights, in turn until neither helps.

    Each is exact for the other; both together need not be.
    """
    most_heights = len({_up(rows, step) for rows, _ in lengths} | {height})
    best = None
    for row_count in range(1, min(limit, most_heights) + 1):
        capacities, candidate = None, None
        while True:
            by_rows, by_keys = Counter(), Counter()
            for (rows, keys), count in lengths.items():
                by_rows[rows] += count * (_fitting(capacities, keys) if capacities else keys)
            heights = best_capacities(by_rows, height, row_count, step)
            for (rows, keys), count in lengths.items():
                by_keys[keys] += count * _fitting(heights, rows)
            capacities = best_capacities(by_keys, longest, limit // len(heights), step)
            plan = _plan(lengths, heights, capacities, "planned")
            if candidate is not None and plan.waste > candidate.waste - 1e-12:
                break
            candidate = plan
        if best is None or candidate.waste < best.waste - 1e-12:
            best = candidate
    return best


def best_capacities(weights: Counter[int], largest: int, count: int, step: int = 1) -> tuple[int, ...]:
    """At most `count` capacities, `largest` among them, that pad lengths of these weights least: exact, by dynamic programming.

    An optimal capacity is one of the lengths (rounded up to `step`); cost[j] is the least padded total of the lengths up to
    candidate j, with j the last capacity.
    """
    rounded = Counter()
    for length, weight in weights.items():
        rounded[_up(length, step)] += weight
    candidates = sorted({*rounded, largest})
    cumulative = [0]
    for length in candidates:
        cumulative.append(cumulative[-1] + rounded[length])
    n = len(candidates)
    cost = [candidates[j] * cumulative[j + 1] for j in range(n)]
    chosen = [[j] for j in range(n)]
    for _ in range(min(count, n) - 1):
        longer, paths = cost[:], chosen[:]
        for j in range(1, n):
            for i in range(j):
                total = cost[i] + candidates[j] * (cumulative[j + 1] - cumulative[i + 1])
                if total < longer[j]:
                    longer[j], paths[j] = total, [*chosen[i], j]
        cost, chosen = longer, paths
    return tuple(candidates[j] for j in chosen[-1])


def _plan(lengths: Counter[tuple[int, int]], rows: tuple[int, ...], keys: tuple[int, ...], policy: str) -> ShapePlan:
    needed = sum(count * r * k for (r, k), count in lengths.items())
    computed = sum(count * _fitting(rows, r) * _fitting(keys, k) for (r, k), count in lengths.items())
    return ShapePlan(tuple(rows), tuple(keys), 1 - needed / computed, policy)


def _fitting(capacities: Sequence[int], length: int) -> int:
    return min(capacity for capacity in capacities if capacity >= length)


def _up(length: int, step: int) -> int:
    return -(-length // step) * step
