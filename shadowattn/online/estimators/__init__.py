"""Estimators: how important a key looks to a query row. One file each; only the order of the scores matters."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shadowattn.online.plan import Group
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, Lists, Selection


class Estimator(Protocol):
    """Scores of keys for query rows.

    To add one: write a class with this method in a file of its own name, a dataclass for it in `experiments/parts.py`,
    and a YAML of the same name in `conf/estimator/`.
    """

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor, heads: Heads | None = None) -> Tensor:
        """Scores float32 [H, Q, K], finite; larger is more important.

        q [H, Q, D] of the heads `heads` (None: all of the layer) and k [G, K, D] of the whole layer, after RoPE; `positions`
        int64 [Q], where the rows stand. Causality is not the estimator's business: selection never offers a key to a row
        before it. But the score of a key must not depend on keys after the row, or it would leak them (static INT8 scales
        are the documented exception). Raises `InputError` on NaN or infinity where its scales are measured.
        """
        ...


@runtime_checkable
class Chooser(Protocol):
    """An estimator that also selects, so that its scores need never exist."""

    def prepare(self, k: Tensor, *, layer: int) -> Any:
        """Whatever `choose` wants to know of k [G, K, D], once a chunk for all of its heads."""
        ...

    def choose(self, q: Tensor, prepared: Any, rule: Rule, lists: Lists, *, positions: Tensor, heads: Heads) -> Selection:
        """The lists that `rule` and `lists` call for; arguments as in `Estimator.estimate`."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """An estimator of which only some heads can share a launch, and which therefore says which."""

    def groups(self, q: Tensor, k: Tensor, *, heads: Heads) -> tuple[list[Group], Any]:
        """Every head of q [H, Q, D] in exactly one group, by its place in q, and whatever `launch` wants to know of q and k."""
        ...

    def launch(self, q: Tensor, k: Tensor, group: Group, known: Any, *, positions: Tensor, heads: Heads) -> Tensor:
        """Scores [h, Q, K] of one group, or of a part of one; q, k and heads as `groups` got them, `known` as it gave it.

        The next launch may overwrite them.
        """
        ...
