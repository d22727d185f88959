"""The share of the weights at which top-p keeps as many keys in the mean as a top-k of fixed size."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.budget import keep_counts
from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.evaluation.recall import sampled_rows
from shadowattn.kernels import TorchKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.top_p import TopP, loose_lists, loose_weights, ranked
from shadowattn.online.selection import Rule
from shadowattn.types import RetentionProfile

_ROWS = 32  # of each chunk
# Shares that are tried, closest where nearly all weight is kept; between two of them the count is taken for linear.
_SHARES = 1 - torch.logspace(0, -8, 513, dtype=torch.float64)


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
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> TopPShare:
    """Runs the windows int64 [W, T] through the model, dense, and prunes the loose lists of 32 rows of every chunk.

    `estimator` says how; its own `top_p` counts for nothing. Returns the share at which heads that keep less than every key keep
    as many keys in the mean over windows, layers, heads and rows as `profile` asks for. Raises `InputError` where there are no
    such heads.
    """
    table = torch.tensor(profile.retention, dtype=torch.float64)
    counts, target, rows_seen, rule, kernels = torch.zeros_like(_SHARES), 0, 0, Rule(), TorchKernels()

    def observe(chunk: Chunk) -> None:
        nonlocal target, rows_seen
        sparse = (table[chunk.layer] < 1).nonzero()[:, 0]
        rows = sampled_rows(chunk.q.shape[1], min(_ROWS, chunk.q.shape[1]))
        if len(sparse) == 0:
            return
        retention = table[chunk.layer][sparse]
        some = replace(chunk[sparse], retention=retention)
        some = some.asking(some.q[:, rows].contiguous(), some.positions[rows])
        target += int(keep_counts(retention, some.positions + 1).sum())
        rows_seen += len(sparse) * len(some.positions)
        kept = loose_lists(some, estimator.estimator, rule, kernels, estimator.loose)
        for head in range(len(sparse)):
            members, weights = loose_weights(some, kept, slice(head, head + 1), estimator.weigher)
            before = ranked(weights, members)[1].view(-1, chunk.keys)
            counts.add_(torch.searchsorted(before, _SHARES.expand(len(before), -1).contiguous()).clamp(min=1).sum(0))

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    if target == 0:
        raise InputError("top_p: expected heads that keep less than every key, got none; set a retention below 1")
    above = int((counts < target).sum())  # the first share that keeps as many
    if above == len(_SHARES):
        return TopPShare(1.0, rows_seen)
    if above == 0:
        raise InputError(f"top_p: even one key a row is more than the {target} keys that the budget has; raise the retention")
    low, high = counts[above - 1], counts[above]
    step = float((target - low) / (high - low))
    return TopPShare(float(_SHARES[above - 1] + step * (_SHARES[above] - _SHARES[above - 1])), rows_seen)
