"""Estimators: how important a key looks to a query row. One file each; only the order of the scores matters."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.exclusive import Exclusive
from shadowattn.online.plan import Group
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, Lists, Selection


@runtime_checkable
class Estimator(Protocol):
    """Scores of keys for query rows. `shadowattn.check_estimator` tells whether a new one keeps the contract.

    `scores_are_finite` True on the very class says that every score is finite, whatever finite q and k it is given: then
    nobody looks.
    To add one: write a class with this method in a file of its own name, a dataclass for it in `experiments/parts.py`,
    and a YAML of the same name in `conf/estimator/`.
    """

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor, heads: Heads | None = None) -> Tensor:
        """Scores float32 or int8 [H, Q, K], finite; larger is more important.

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
    units = estimator.units(q, k, layer=layer, heads=heads)
    checks.vector(f"units of {type(estimator).__name__}", units, len(heads), dtype=torch.float32)
    scales = units * scale
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise InputError(
            f"units of {type(estimator).__name__}: expected positive finite numbers, also times scale={scale:.3g}, got "
            f"{units.tolist()}; correct the estimator"
        )
    return scales


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


@runtime_checkable
class Stateful(Protocol):
    """An estimator with memory that its calls share, such as a bank's. Each call alone may come from any thread."""

    @property
    def exclusive(self) -> Exclusive:
        """Guards that memory. For work that holds it, scores are what a launch left in that memory; else they are copies."""
        ...


def using(estimator: Estimator) -> AbstractContextManager:
    """The estimator's memory for the calling thread's work alone until left; nothing where its calls share none."""
    return estimator.exclusive.use() if isinstance(estimator, Stateful) else nullcontext()


def check_estimator_type(estimator: Estimator) -> Estimator:
    """What it is given. Raises `InputError` where that is a class, a bank, or anything else that estimates nothing."""
    if isinstance(estimator, type):
        raise InputError(f"estimator: expected an object, got the class {estimator.__name__}; give {estimator.__name__}(…)")
    if not isinstance(estimator, Estimator):
        raise InputError(
            f"estimator: expected an object with `estimate`, got {checks.shown(estimator)}; of a GraphBank make one with "
            "shadowattn.online.estimators.int8.Int8(bank)"
        )
    return estimator


def check_scores(scores: Tensor, estimator: Estimator, *, heads: int, rows: int, keys: int) -> None:
    """Raises `InputError` where scores are not float32 or int8 [heads, rows, keys], or where one is NaN or infinite.

    Selection would take NaN for the largest score or for the least, and go on; infinities become NaN where rows are pooled.
    Looking for them takes a read of all scores, half the time of a copy, which is spared where the class itself says that they
    are finite.
    """
    name = f"scores of {type(estimator).__name__}"
    checks.tensors((torch.float32, torch.int8), **{name: scores})
    if scores.shape != (heads, rows, keys):
        raise InputError(f"{name}: expected [H, Q, K] = {[heads, rows, keys]}, got {list(scores.shape)}; correct the estimator")
    if scores.dtype == torch.int8 or vars(type(estimator)).get("scores_are_finite", False):
        return
    # NaN and infinities make a sum anything but finite; so may large scores, which the second look tells from them.
    if not scores.sum().isfinite() and not scores.isfinite().all():
        raise InputError(
            f"{name}: got NaN or infinity; a ranking of keys would mean nothing; correct the estimator, or its inputs"
        )
