"""The paper's estimator: INT8 Q·K from a bank of static graphs, picked by each head's measured scales (section 3.3)."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import launches
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.online.plan import Group
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

    @property
    def device(self) -> str:
        """Where the graphs run, as OpenVINO names it."""
        return self.bank.device

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor, heads: Heads | None = None) -> Tensor:
        heads = heads or Heads.all(q.shape[0], k.shape[0])
        scores = torch.empty(*q.shape[:2], k.shape[1])
        for group in self.groups(q, k, heads=heads):
            scores[list(group.heads)] = self.launch(q, k, group, heads=heads)
        return scores

    def groups(self, q: Tensor, k: Tensor, *, heads: Heads) -> list[Group]:
        """Launches of heads that share a bucket, as many to a launch as the bank has graphs for."""
        q_scales, k_scales = absmax_scales(q).tolist(), absmax_scales(k)[heads.kv].tolist()
        buckets = defaultdict(list)
        for head, scales in enumerate(zip(q_scales, k_scales, strict=True)):
            bucket = self.bank.nearest(*scales)
            buckets[bucket].append(head)
            self.clipped += scales[0] > self.bank.pairs[bucket][0] or scales[1] > self.bank.pairs[bucket][1]
        made = []
        for bucket, members in buckets.items():
            for taken, _ in launches(len(members), self.bank.launch_heads):
                made.append(Group(tuple(members[:taken]), bucket))
                members = members[taken:]
        return made

    def launch(self, q: Tensor, k: Tensor, group: Group, *, heads: Heads) -> Tensor:
        """One run of one graph. The result is a view of a buffer that the next run overwrites."""
        batch = list(group.heads)
        ((_, size),) = launches(len(batch), self.bank.launch_heads)
        shape = {"heads": size, "rows": q.shape[1], "keys": k.shape[1], "head_dim": q.shape[2]}
        graph = self.bank.lookup(*self.bank.pairs[group.bucket], **shape)
        self.launched += 1
        return torch.from_numpy(graph.run(q[batch], k[heads.kv[batch]]))
