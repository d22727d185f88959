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
    counts = lists.indptr.diff().view(scores.shape[:2])
    for head in range(scores.shape[0]):
        for b in range(scores.shape[1]):
            candidates, tail = int(lists.candidates[b]), int(lists.tail[b])
            ranked = scores[head, b, :candidates].double() + 0.0  # −0 is 0
            window = list(range(candidates))[::-1][: lists.recent]
            sinks = list(range(min(lists.sinks, candidates)))
            by_score = torch.sort(ranked, descending=True, stable=True).indices.tolist()
            order = list(dict.fromkeys([*window[: lists.self_first], *sinks, *window, *by_score]))
            chosen = sorted(order[: int(counts[head, b]) - tail])
            found.append(torch.tensor([*chosen, *range(candidates, candidates + tail)]))
    return torch.cat(found).to(torch.int32)
