"""The paper's estimator: INT8 Q·K from a bank of static graphs, picked by each head's measured scales (section 3.3)."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import launches
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.types import Heads


def absmax_scales(x: Tensor) -> Tensor:
    """The real value of one integer step, absmax / 127 over each head's rows; float32 [heads] for x [heads, rows, D].

    Raises `InputError` on NaN or infinity: a ranking of such keys would mean nothing.
    """
    largest = torch.maximum(-x.amin((1, 2)), x.amax((1, 2))).float()
    if not torch.isfinite(largest).all():
        raise InputError("expected finite q and k, got NaN or infinity; a ranking of keys would mean nothing")
    return largest.clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX


@dataclass
class Int8:
    """Scores from the bank. Heads whose scales fall into one bucket share launches.

    Q's scale is measured over the chunk's rows, K's over all keys given, as the authors do: which bucket serves a
    chunk is therefore the one thing that depends on the chunk as a whole.
    """

    bank: GraphBank
    clipped: int = field(default=0, init=False)  # heads whose measured Q or K scale exceeded their bucket's
    launched: int = field(default=0, init=False)

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor, heads: Heads | None = None) -> Tensor:
        count, rows, dim = q.shape
        keys, kv_head = k.shape[1], (heads or Heads.all(count, k.shape[0])).kv
        q_scales, k_scales = absmax_scales(q).tolist(), absmax_scales(k)[kv_head].tolist()
        buckets = defaultdict(list)
        for head in range(count):
            bucket = self.bank.nearest(q_scales[head], k_scales[head])
            buckets[bucket].append(head)
            q_static, k_static = self.bank.pairs[bucket]
            self.clipped += q_scales[head] > q_static or k_scales[head] > k_static
        scores = torch.empty(count, rows, keys)
        for bucket, members in buckets.items():
            for taken, size in launches(len(members), self.bank.launch_heads):
                batch, members = members[:taken], members[taken:]
                graph = self.bank.lookup(*self.bank.pairs[bucket], heads=size, rows=rows, keys=keys, head_dim=dim)
                scores[batch] = torch.from_numpy(graph.run(q[batch], k[kv_head[batch]]))
                self.launched += 1
        return scores
