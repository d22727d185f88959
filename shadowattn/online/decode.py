"""Decode on selected keys: one new query a head, one list a key/value group.

Lists of single heads would together touch most of a group's keys (1 − 0.8⁷ = 79 % for seven heads at retention 0.2), and at
one row a step the time goes into reading K and V. So the heads of a group share a list, and each of its keys is read once.
"""

import torch
from torch import Tensor

from shadowattn.kernels import Kernels
from shadowattn.online.estimators import Estimator, check_scores, using
from shadowattn.online.selection import Rule
from shadowattn.types import Heads, Selection


def shared_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    retention: Tensor,
    *,
    layer: int,
    estimator: Estimator,
    rule: Rule,
    kernels: Kernels,
    scale: float,
) -> Tensor:
    """Attention of q [H, 1, D], standing at the last key, on its group's list; k and v [G, K, D]. Returns [H, 1, D].

    A key's score is the sum of its estimates over the group's heads, each divided by its standard deviation over the keys, so
    that no head outweighs the others. The group keeps as much as the head of it that keeps most (`retention` float64 [H]),
    with the sinks and the recent window of `rule`.
    """
    count, _, dim = q.shape
    groups, keys, _ = k.shape
    last = torch.tensor([keys - 1])
    with using(estimator):
        scores = estimator.estimate(q, k, layer=layer, positions=last, heads=Heads.all(count, groups))
        check_scores(scores, estimator, heads=count, rows=1, keys=keys)
        scores = scores[:, 0].float()
        spread = scores.std(1, keepdim=True, correction=0)
        # A head whose scores are all alike (but for rounding) has no say.
        alike = spread <= 1e-6 * scores.abs().amax(1, keepdim=True)
        shared = torch.where(alike, 0.0, scores / spread).view(groups, -1, keys).sum(1)
    lists = Rule(sinks=rule.sinks, recent=rule.recent).lists(retention.view(groups, -1).amax(1), last)
    selection = kernels.select(shared[:, None], lists)
    # The group's heads are the rows of one block, all at the last position.
    rows = Selection(selection.indices, selection.starts, last.expand(count // groups).contiguous(), count // groups)
    folded = q.reshape(groups, count // groups, dim)
    return kernels.attend(folded, k, v, rows, Heads.all(groups, groups), scale=scale).view(q.shape)
