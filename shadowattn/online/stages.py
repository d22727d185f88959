"""Estimate → select → attend for one chunk, the one place where it is written down; executors say for which heads and when.

A head is named by its place in the chunk. Whatever heads a stage is asked for together, each gets what it would get alone.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.kernels import Kernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator, check_lists, check_scores, logit_scales
from shadowattn.online.plan import Group
from shadowattn.online.selection import Rule
from shadowattn.types import Lists, Selection


@dataclass(frozen=True)
class Parts:
    """What the stages are made of."""

    estimator: Estimator
    rule: Rule
    kernels: Kernels


class Stages:
    """The three stages of one chunk (section 3.4); two, where the estimator makes lists without scores."""

    def __init__(self, chunk: Chunk, parts: Parts):
        self.chunk = chunk
        self.estimator, self.rule, self.kernels = parts.estimator, parts.rule, parts.kernels

    @property
    def selects_in_estimate(self) -> bool:
        """Whether scores never exist, so that there are two stages, not three."""
        return self.estimator.selects

    @property
    def reuses_scores(self) -> bool:
        """Whether a launch overwrites the scores of the one before."""
        return not self.estimator.selects and self.estimator.reuses_scores

    @property
    def scores_of_head(self) -> tuple[int, int]:
        """Rows and keys that a head has scores of."""
        return self._asked.q.shape[1], self.chunk.keys

    def most_listed(self) -> int:
        """Length of the longest lists of a head."""
        return int(self._lists.indptr[:: len(self._lists.candidates)].diff().max())

    @property
    def attends_at_once(self) -> bool:
        """Whether there is one stage, in which rows attend to what they choose."""
        return self.estimator.attends(self.rule, self.kernels)

    @property
    def listed_keys(self) -> int:
        """Length of all heads' lists together."""
        return self._lists.size

    def prepare(self) -> None:
        """Does what all heads share, so that no head's stage has to: budgets, buckets, packed keys."""
        _ = self._lists
        self.estimator.prepare(self._asked)
        _ = None if self.selects_in_estimate else self._logit_scales

    def launches(self) -> list[Group]:
        """The heads that may share a launch: those of one scale bucket, or without buckets those that read the same keys, where
        their scores fit.
        """
        return self.estimator.launches(self._asked)

    def launch(self, group: Group, out: Tensor | None = None) -> Tensor:
        """Scores [h, rows, K] of a group of `launches`, or of a part of one. The next launch may overwrite them, unless they are
        in `out`, which is uint8 of as many bytes as `room` says.
        """
        part, into = self._asked[group.heads], {} if out is None else {"out": out}
        scores = check_scores(self.estimator.launch(self._asked, group, **into), self.estimator, part)
        if out is not None and scores.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
            raise InputError(
                f"{type(self.estimator).__name__}: expected scores in the memory that launch got as out, got them in other "
                "memory; correct launch, or let room return None"
            )
        return scores

    def room(self, group: Group) -> int | None:
        """Bytes that a launch of one head can be given for its scores; None where it returns memory of its own."""
        alone = len(group.heads) == 1 and self.reuses_scores and self.estimator.granularity == "head"
        return self.estimator.room(self._asked, group) if alone else None

    def waiting_bytes(self, group: Group) -> int:
        """Of the scores of one head of a launch, or of the memory that they are in, which may have room for more."""
        return self.room(group) or 4 * math.prod(self.scores_of_head)

    def estimate(self, group: Group) -> Tensor:
        """Scores [h, rows, K] of any neighbouring heads, in as many launches as that takes."""
        part = self._asked[group.heads]
        return check_scores(self.estimator.scores(part), self.estimator, part)

    def select(self, scores: Tensor, heads: slice, out: Tensor | None = None) -> Selection:
        """The lists of some heads from their scores [h, rows, K]; in `out` int32 [`listed(heads)`], if given."""
        to_logits = None if self._logit_scales is None else self._logit_scales[heads]
        into = {} if out is None else {"out": out}
        selection = self.kernels.select(self.rule.pool(scores, self.chunk.positions, to_logits), self._lists[heads], **into)
        if out is not None and selection.indices.data_ptr() != out.data_ptr():
            raise InputError(f"{type(self.kernels).__name__}.select: expected lists in the memory that it got as out")
        return selection

    def listed(self, heads: slice) -> int:
        """Length of the lists of some heads together."""
        return self._lists[heads].size

    def choose(self, heads: slice) -> Selection:
        """The lists of some heads where the estimator selects."""
        lists = self._lists[heads]
        return check_lists(self.estimator.select(self.chunk[heads], self.rule, lists, self.kernels), lists, self.estimator)

    def attend_at_once(self, *, listed: bool) -> tuple[Tensor, Selection | int]:
        """Output [H, Q, D] of all heads, and their lists or, unless they are to be `listed`, how many (head, row, key) pairs
        these keep."""
        out, kept = self.estimator.attend(self.chunk, self.rule, lambda: self._lists, listed=listed)
        expected = Selection if listed else int
        if not isinstance(kept, expected):
            raise InputError(
                f"{type(self.estimator).__name__}.attend: expected the output and, with listed={listed}, "
                f"{'the lists' if listed else 'how many pairs they keep'}, a {expected.__name__}, got {type(kept).__name__}"
            )
        return out, kept

    def attend(self, selection: Selection, heads: slice) -> Tensor:
        """Output [h, Q, D] of some heads."""
        some = self.chunk[heads]
        return self.kernels.attend(some.q, some.k, some.v, selection, some.heads, scale=some.scale)

    @cached_property
    def _asked(self) -> Chunk:
        return self.rule.scored(self.chunk)

    @cached_property
    def _lists(self) -> Lists:
        return self.rule.lists(self.chunk.retention, self.chunk.positions)

    @cached_property
    def _logit_scales(self) -> Tensor | None:
        return logit_scales(self.estimator, self.rule, self._asked)
