"""Estimators: how important a key looks to a query row. One file each; only the order of the scores matters."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shadowattn.errors import InputError
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

    def choose(
        self, q: Tensor, prepared: Any, rule: Rule, lists: Lists, *, positions: Tensor, heads: Heads, scale: float
    ) -> Selection:
        """The lists that `rule` and `lists` call for; arguments as in `Estimator.estimate`, `scale` that of the softmax."""
        ...


@runtime_checkable
class Scaled(Protocol):
    """An estimator whose scores are q·k in known units, so that a softmax of them is an estimate of the attention."""

    def units(self, q: Tensor, k: Tensor, *, layer: int, heads: Heads) -> Tensor:
        """What a score of 1 is worth in q·k, float32 [H]; arguments as in `Estimator.estimate`."""
        ...


def logit_scales(
    estimator: Estimator, rule: Rule, q: Tensor, k: Tensor, *, layer: int, heads: Heads, scale: float
) -> Tensor | None:
    """What scores are multiplied by to become the softmax's logits, float32 [H]; None where `rule` does not ask.

    Raises `InputError` where the rule needs it and the estimator's scores have no unit.
    """
    if rule.pooling != "probability":
        return None
    if not isinstance(estimator, Scaled):
        raise InputError(
            "block_score=probability: expected an estimator whose scores are q·k in known units, such as oracle or int8, got "
            f"{type(estimator).__name__}; use block_score=max"
        )
    return estimator.units(q, k, layer=layer, heads=heads) * scale


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
