"""What a bank holds graphs for: shapes, and static scale pairs (section 3.3)."""

import math
from dataclasses import dataclass

from shadowattn.errors import InputError

DISTANCES = ("raw", "log")


@dataclass(frozen=True, order=True)
class GraphShape:
    """One static shape: `heads` in one launch, `rows` of a query chunk, `head_dim`, `keys` of capacity."""

    heads: int
    rows: int
    head_dim: int
    keys: int


def plan_shapes(
    *, heads: int, head_dim: int, chunk_tokens: int, context_tokens: int, launch_heads: tuple[int, ...]
) -> tuple[GraphShape, ...]:
    """The shapes that serve every chunk of a prompt of up to `context_tokens` tokens.

    Key capacities double from one chunk to the context, so that no launch computes more than twice the keys it needs.
    `launch_heads` are the numbers of heads that may share a launch.
    """
    if min(chunk_tokens, context_tokens) < 1:
        raise InputError(f"expected at least one token, got chunk_tokens={chunk_tokens} context_tokens={context_tokens}")
    if not launch_heads or min(launch_heads) < 1:
        raise InputError(f"launch_heads: expected at least one number of heads, each at least 1, got {launch_heads}")
    rows = min(chunk_tokens, context_tokens)
    capacities = [rows]
    while capacities[-1] < context_tokens:
        capacities.append(min(2 * capacities[-1], context_tokens))
    return tuple(
        GraphShape(count, rows, head_dim, keys) for count in sorted(launch_heads) if count <= heads for keys in capacities
    )


def nearest_pair(pairs: tuple[tuple[float, float], ...], q_scale: float, k_scale: float, *, distance: str = "raw") -> int:
    """The bucket with the least squared error to the measured scales; ties to the first.

    `raw` compares the scales themselves, as the authors do, `log` their logarithms, so that twice and half are equally far.
    A head whose scale exceeds its bucket's is clipped.
    """
    if distance not in DISTANCES:
        raise InputError(f"lookup: expected one of {', '.join(DISTANCES)}, got {distance!r}")
    scale = math.log if distance == "log" else float
    q, k = scale(q_scale), scale(k_scale)
    return min(range(len(pairs)), key=lambda i: (scale(pairs[i][0]) - q) ** 2 + (scale(pairs[i][1]) - k) ** 2)


def launches(heads: int, counts: list[int]) -> list[tuple[int, int]]:
    """How `heads` heads are spread over launches of the given sizes: pairs (heads taken, size), largest first.

    Where no size divides what is left, the smallest one that holds it runs partly empty.
    """
    plan = []
    while heads:
        fitting = [count for count in counts if count <= heads]
        size = max(fitting) if fitting else min(counts)
        plan.append((min(size, heads), size))
        heads -= plan[-1][0]
    return plan
