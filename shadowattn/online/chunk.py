"""One layer's chunk of rows, and the three stages of each of its heads: what a pipeline overlaps (section 3.4)."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shadowattn.kernels import Kernels
from shadowattn.online.estimators import Chooser, Estimator, Launcher, check_scores, logit_scales
from shadowattn.online.plan import Group
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, Lists, Selection


@dataclass(frozen=True)
class Chunk:
    """Arguments as in `path.attend_chunk`. Heads are named by their place in q, and results are those of the whole chunk's path.

    q [H, Q, D] of the heads `heads` at `positions` [Q]; k and v [G, K, D] up to the last row's own key; retention [H].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    retention: Tensor
    layer: int
    positions: Tensor
    heads: Heads
    estimator: Estimator
    rule: Rule
    kernels: Kernels
    scale: float

    def arguments(self) -> dict[str, Any]:
        """What it was made of, as `path.attend_chunk` takes it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def device(self) -> str:
        """Where the estimate runs, as OpenVINO names it."""
        return getattr(self.estimator, "device", "CPU")

    @cached_property
    def selects_in_estimate(self) -> bool:
        """Whether scores never exist, so that there are two stages, not three."""
        return isinstance(self.estimator, Chooser)

    @cached_property
    def reuses_scores(self) -> bool:
        """Whether a launch overwrites the scores of the one before."""
        return isinstance(self.estimator, Launcher)

    def prepare(self) -> None:
        """Does what all heads share, so that no head's stage has to: budgets, buckets, packed keys."""
        _ = self._lists, self._scored
        if self.reuses_scores:
            _ = self._grouped
        _ = self._prepared if self.selects_in_estimate else self._logit_scales

    def groups(self) -> list[Group]:
        """The heads that may share a launch: those of one scale bucket, or without buckets those that read the same keys."""
        if self.reuses_scores:
            return self._grouped[0]
        return [Group(tuple(range(part.start, part.stop))) for _, part in self.heads.grouped()]

    def estimate(self, group: Group) -> Tensor:
        """Scores [h, rows, K] of a group's heads. The next launch may overwrite them."""
        scored, at = self._scored
        if self.reuses_scores:
            scores = self.estimator.launch(scored, self.k, group, self._grouped[1], positions=at, heads=self.heads)
        else:
            first, last = group.heads[0], group.heads[-1]
            run = list(group.heads) == list(range(first, last + 1))
            part = slice(first, last + 1) if run else torch.tensor(group.heads)  # a slice copies nothing
            scores = self.estimator.estimate(scored[part], self.k, layer=self.layer, positions=at, heads=self.heads[part])
        check_scores(scores, self.estimator, heads=len(group.heads), rows=len(at), keys=self.k.shape[1])
        return scores

    def select(self, scores: Tensor, head: int) -> Selection:
        """The lists of one head from its scores [1, rows, K]."""
        part = slice(head, head + 1)
        to_logits = None if self._logit_scales is None else self._logit_scales[part]
        return self.kernels.select(self.rule.pool(scores, self.positions, to_logits), self._lists[part])

    def choose(self, head: int) -> Selection:
        """The lists of one head where the estimator selects."""
        part = slice(head, head + 1)
        how = {"positions": self.positions, "heads": self.heads[part], "scale": self.scale}
        return self.estimator.choose(self.q[part], self._prepared, self.rule, self._lists[part], **how)

    def attend(self, selection: Selection, head: int) -> Tensor:
        """Output [1, Q, D] of one head."""
        part = slice(head, head + 1)
        return self.kernels.attend(self.q[part], self.k, self.v, selection, self.heads[part], scale=self.scale)

    @cached_property
    def _scored(self) -> tuple[Tensor, Tensor]:
        return self.rule.scored(self.q, self.positions)

    @cached_property
    def _grouped(self) -> tuple[list[Group], Any]:
        return self.estimator.groups(self._scored[0], self.k, heads=self.heads)

    @cached_property
    def _lists(self) -> Lists:
        return self.rule.lists(self.retention, self.positions)

    @cached_property
    def _logit_scales(self) -> Tensor | None:
        return logit_scales(self.estimator, self.rule, self.q, self.k, layer=self.layer, heads=self.heads, scale=self.scale)

    @cached_property
    def _prepared(self) -> Any:
        return self.estimator.prepare(self.k, layer=self.layer)
