"""The specification in float64, on masks."""

import math

import torch
from torch import Tensor

from shadowattn.types import Lists, Selection
from tests.selections import as_mask


def hidden_by_lists(selection: Selection, keys: int) -> Tensor:
    """bool [H, Q, K]: what a row does not attend to."""
    return ~as_mask(selection, keys)


def attention_float64(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Softmax attention of q [H, Q, D] on the keys that are not hidden; k and v [G, K, D]."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    return torch.softmax((q.double() @ k.transpose(1, 2) * scale).masked_fill(hidden, -math.inf), -1) @ v


def best_keys(scores: Tensor, lists: Lists) -> Tensor:
    """All lists one after another, each by a stable sort."""
    found = []
    counts = lists.starts.diff().view(scores.shape[:2])
    for head in range(scores.shape[0]):
        for b in range(scores.shape[1]):
            offered, appended = int(lists.offered[b]), int(lists.appended[b])
            ranked = scores[head, b, :offered].double() + 0.0  # −0 is 0
            ranked[: lists.sinks] = math.inf
            ranked[max(0, offered - lists.recent) : offered] = math.inf
            if lists.own is not None:
                ranked[int(lists.own[b])] = math.inf
            order = torch.sort(ranked, descending=True, stable=True).indices
            chosen = order[: int(counts[head, b]) - appended].sort().values
            found.append(torch.cat([chosen, torch.arange(offered, offered + appended)]))
    return torch.cat(found).to(torch.int32)
