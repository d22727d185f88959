"""The share of the weights at which top-p keeps as many keys in the mean as a top-k of fixed size."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.budget import keep_counts
from shadowattn.engine.observe import observe_prefill
from shadowattn.engine.prefill import prefill_chunks
from shadowattn.errors import InputError
from shadowattn.evaluation.recall import sampled_rows
from shadowattn.kernels import TorchKernels
from shadowattn.method import attach
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.top_p import TopP, check_rows, forced, four_bit_keys, loose_lists, loose_weights, ranked
from shadowattn.online.selection import Rule
from shadowattn.types import RetentionProfile

_ROWS = 32  # of each chunk
_SPARSE_PASSES = 2
_PLAIN = Rule()
# Shares that are tried, closest where nearly all weight is kept; between two of them the count is taken for linear.
# With the first one rows keep the fewest keys that they can.
_SHARES = (1 - torch.logspace(0, -8, 513, dtype=torch.float64)).clamp(min=1e-9)


@dataclass(frozen=True)
class TopPShare:
    """What `TopP` is to keep of the weights, in (0, 1]; found on `rows` rows of heads."""

    share: float
    rows: int


def observe_top_p(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    profile: RetentionProfile,
    estimator: TopP,
    chunk_tokens: int,
    rule: Rule = _PLAIN,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> TopPShare:
    """Runs the windows int64 [W, T] through the model and prunes the loose lists of 32 rows of every chunk.

    First dense, then twice with what was found so far: where attention is sparse it is less concentrated, and the same share
    keeps more keys. `estimator` says how; its own `top_p` counts for nothing. Returns the share at which heads that keep less
    than every key keep as many keys in the mean over windows, layers, heads and rows as `profile` and the least budget of `rule`
    ask for, its sinks and window among them. Raises `InputError` where there are no such heads, where sinks and windows alone are
    more, and on lists of several rows.
    """
    check_rows(rule)
    counts = _Counts(profile, estimator, rule)
    observe_prefill(model, windows, counts.add, chunk_tokens=chunk_tokens, progress=progress)
    for _ in range(_SPARSE_PASSES):
        share, counts = counts.share(), _Counts(profile, estimator, rule)
        how = {"estimator": replace(estimator, top_p=share.share)}
        how |= {"sinks": rule.sinks, "recent": rule.recent, "min_budget": rule.min_budget}
        observers = (lambda seen, counts=counts: counts.add(seen.chunk),)
        with attach(model, profile, chunk_tokens=chunk_tokens, observers=observers, **how):
            for window in progress(windows):
                for _ in prefill_chunks(model, window, chunk_tokens=chunk_tokens):
                    pass
    return counts.share()


class _Counts:
    """How many keys the rows of some chunks keep at every share, and how many they should."""

    def __init__(self, profile: RetentionProfile, estimator: TopP, rule: Rule):
        self._table, self._estimator, self._rule = torch.tensor(profile.retention, dtype=torch.float64), estimator, rule
        self._counts, self._target, self._rows = torch.zeros_like(_SHARES), 0, 0  # counts lie where the chunks do

    def add(self, chunk: Chunk) -> None:
        """Counts the heads of a chunk that keep less than every key."""
        place = chunk.q.device
        retention = self._table[chunk.layer].to(place)[chunk.heads.ids]
        sparse = (retention < 1).nonzero()[:, 0]
        if len(sparse) == 0:
            return
        # Estimators may rank a row by others of its chunk, and add up what rows attended to: all rows go, and as if for the first
        # time, though some of them are looked at.
        some, estimator = replace(chunk.rewound()[sparse], retention=retention[sparse]), self._estimator
        kept = loose_lists(some, estimator.estimator, self._rule, TorchKernels(), estimator.loose)
        rows = sampled_rows(chunk.q.shape[1], min(_ROWS, chunk.q.shape[1]))
        counts = keep_counts(retention[sparse], some.positions[rows] + 1, self._rule.min_budget)
        self._target += int(counts.sum())
        self._rows += counts.numel()
        keys, always = four_bit_keys(some, estimator.key_offset), forced(some, self._rule)[rows]
        for head in range(len(sparse)):
            members, weights = (of_head[0, rows] for of_head in loose_weights(some, kept, slice(head, head + 1), keys))
            _, above = ranked(weights, members, always, self._rule.min_budget)
            enough = torch.searchsorted(above, _SHARES.to(place).expand(len(above), -1).contiguous())
            self._counts = self._counts.to(place) + enough.sum(0)

    def share(self) -> TopPShare:
        """The share at which as many are kept as should be."""
        counts, target = self._counts, self._target
        if target == 0:
            raise InputError("top_p: expected heads that keep less than every key, got none; set a retention below 1")
        above = int((counts < target).sum())  # the first share that keeps as many
        if above == len(_SHARES):
            return TopPShare(1.0, self._rows)
        if above == 0 and counts[0] > target:
            raise InputError(
                f"top_p: the least that rows can keep, {int(counts[0])} keys with the rule's sinks and window, is more than the "
                f"{target} that the budget has; raise the retention or min_budget, or have fewer of them"
            )
        if above == 0:
            return TopPShare(float(_SHARES[0]), self._rows)
        low, high = int(counts[above - 1]), int(counts[above])
        step = (target - low) / (high - low)
        return TopPShare(float(_SHARES[above - 1] + step * (_SHARES[above] - _SHARES[above - 1])), self._rows)
