"""The paper's estimator: INT8 Q·K from a bank of static graphs, picked by each head's measured scales (section 3.3)."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import launches
from shadowattn.graphs.estimation import INT8_MAX


def absmax_scales(x: Tensor) -> Tensor:
    """The real value of one integer step, absmax / 127 over each head's rows; float32 [heads] for x [heads, rows, D]."""
    return x.float().abs().amax((1, 2)).clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX


@dataclass
class Int8:
    """Scores from the bank. Heads whose scales fall into one bucket share launches.

    Q's scale is measured over the chunk's rows, K's over all keys given, as the authors do: which bucket serves a
    chunk is therefore the one thing that depends on the chunk as a whole.
    """

    bank: GraphBank
    clipped: int = field(default=0, init=False)  # heads whose measured Q or K scale exceeded their bucket's
    launched: int = field(default=0, init=False)

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor) -> Tensor:
        heads, rows, dim = q.shape
        groups, keys, _ = k.shape
        kv_head = torch.arange(heads) // (heads // groups)
        q_scales, k_scales = absmax_scales(q).tolist(), absmax_scales(k)[kv_head].tolist()
        buckets = defaultdict(list)
        for head in range(heads):
            bucket = self.bank.nearest(q_scales[head], k_scales[head])
            buckets[bucket].append(head)
            q_static, k_static = self.bank.pairs[bucket]
            self.clipped += q_scales[head] > q_static or k_scales[head] > k_static
        scores = torch.empty(heads, rows, keys)
        for bucket, members in buckets.items():
            for taken, size in launches(len(members), self.bank.launch_heads):
                batch, members = members[:taken], members[taken:]
                graph = self.bank.lookup(*self.bank.pairs[bucket], heads=size, rows=rows, keys=keys, head_dim=dim)
                scores[batch] = torch.from_numpy(graph.run(q[batch], k[kv_head[batch]]))
                self.launched += 1
        return scores
