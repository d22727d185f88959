"""Decode on selected keys: one new query a head, one list a key/value group.

Lists of single heads would together touch most of a group's keys (1 − 0.8⁷ = 79 % for seven heads at retention 0.2), and at
one row a step the time goes into reading K and V. So the heads of a group share a list, and each of its keys is read once.
"""

from torch import Tensor

from shadowattn.online.chunk import Chunk
from shadowattn.online.stages import Parts


def shared_decode(chunk: Chunk, parts: Parts) -> Tensor:
    """Attention of a chunk of one row, q [H, 1, D], each head on its group's list. Returns [H, 1, D].

    Keys are ranked by `Estimator.shared_scores`. The group keeps as much as the head of it that keeps most, with the sinks and
    the recent window of the rule.
    """
    retention, heads = chunk.retention.tolist(), len(chunk.heads) // chunk.k.shape[0]
    of_groups = [max(retention[first : first + heads]) for first in range(0, len(retention), heads)]
    lists = parts.rule.step_lists(of_groups, chunk.positions)
    with parts.estimator.use():
        return parts.estimator.attend_shared(chunk, lists, parts.kernels)
