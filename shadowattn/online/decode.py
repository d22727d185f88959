"""Decode on selected keys: one new query a head, one list a key/value group.

Lists of single heads would together touch most of a group's keys (1 − 0.8⁷ = 79 % for seven heads at retention 0.2), and at
one row a step the time goes into reading K and V. So the heads of a group share a list, and each of its keys is read once.
"""

import torch
from torch import Tensor

from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import check_scores
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts
from shadowattn.types import Heads, Selection


def shared_decode(chunk: Chunk, parts: Parts) -> Tensor:
    """Attention of a chunk of one row, q [H, 1, D], each head on its group's list. Returns [H, 1, D].

    A key's score is the sum of its estimates over the group's heads, each divided by its standard deviation over the keys, so
    that no head outweighs the others. The group keeps as much as the head of it that keeps most, with the sinks and the recent
    window of the rule.
    """
    count, _, dim = chunk.q.shape
    groups, rule = chunk.k.shape[0], parts.rule
    with parts.estimator.use():
        scores = check_scores(parts.estimator.scores(chunk), parts.estimator, chunk)[:, 0].float()
        spread = scores.std(1, keepdim=True, correction=0)
        # A head whose scores are all alike (but for rounding) has no say.
        alike = spread <= 1e-6 * scores.abs().amax(1, keepdim=True)
        shared = torch.where(alike, 0.0, scores / spread).view(groups, -1, chunk.keys).sum(1)
    lists = Rule(sinks=rule.sinks, recent=rule.recent).lists(chunk.retention.view(groups, -1).amax(1), chunk.positions)
    selection = parts.kernels.select(shared[:, None], lists)
    # The group's heads are the rows of one block, all at the last position.
    at = chunk.positions.expand(count // groups).contiguous()
    rows = Selection(selection.indices, selection.indptr, at, count // groups)
    folded = chunk.q.reshape(groups, count // groups, dim)
    out = parts.kernels.attend(folded, chunk.k, chunk.v, rows, Heads.all(groups, groups, folded.device), scale=chunk.scale)
    return out.view(chunk.q.shape)
