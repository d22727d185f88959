"""What a bank holds graphs for: shapes, and static scale pairs (section 3.3)."""

import math
from dataclasses import dataclass
from fractions import Fraction

from shadowattn import checks
from shadowattn.errors import InputError

DISTANCES = ("raw", "log")
# Times the largest scale of a grid: beyond it floats round away what tells one scale's distance from another's.
_FAR = 1e3
SCORE_BYTES = 64 << 20  # of the scores that one launch of several heads makes


@dataclass(frozen=True, order=True)
class GraphShape:
    """One static shape: `heads` query heads in one launch, `rows` of a query chunk, `head_dim`, `keys` of capacity.

    `group` neighbouring query heads read the same keys (GQA), so that K is passed once for them: the graph sees
    heads / group key heads and folds the group into rows. `top_k` indices a row come back where the graph also selects.
    """

    heads: int
    rows: int
    head_dim: int
    keys: int
    group: int = 1
    top_k: int = 0

    def __post_init__(self):
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, checks.integer(f"GraphShape.{name}", value, least=int(name != "top_k")))
        if self.heads % self.group:
            raise InputError(f"expected heads a multiple of group, got {self}")

    @property
    def kv_heads(self) -> int:
        """Key heads that the graph takes."""
        return self.heads // self.group


def nearest_pair(pairs: tuple[tuple[float, float], ...], q_scale: float, k_scale: float, *, distance: str = "raw") -> int:
    """The bucket with the least squared error to the measured scales; ties to the first.

    `raw` compares the scales themselves, as the authors do, `log` their logarithms, so that twice and half are equally far.
    A head whose scale exceeds its bucket's is clipped. Raises `InputError` where a scale is not positive and finite.
    """
    checks.one_of("lookup", distance, DISTANCES)
    q_scale, k_scale = checks.positive("lookup: q_scale", q_scale), checks.positive("lookup: k_scale", k_scale)
    exact = Fraction if max(q_scale, k_scale) > _FAR * max(map(max, pairs)) else float
    scale = math.log if distance == "log" else exact
    q, k = scale(q_scale), scale(k_scale)
    return min(range(len(pairs)), key=lambda i: (scale(pairs[i][0]) - q) ** 2 + (scale(pairs[i][1]) - k) ** 2)


def heads_at_once(rows: int, keys: int) -> int:
    """Heads whose scores, float32 [heads, rows, keys], a launch may hold: at least one."""
    return max(1, SCORE_BYTES // (4 * rows * keys))


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
