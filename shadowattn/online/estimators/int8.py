"""The paper's estimator: INT8 Q·K from a bank of static graphs, picked by each head's measured scales (section 3.3)."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn.exclusive import Exclusive
from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import launches
from shadowattn.graphs.quantize import absmax_scales
from shadowattn.online.plan import Group
from shadowattn.types import Heads


@dataclass(frozen=True)
class Buckets:
    """The scale pair that serves each of some heads, by index and by value."""

    pairs: list[int]
    q_scales: Tensor  # float32 [H], of the pairs
    k_scales: Tensor
    clipped: int  # heads whose measured Q or K scale exceeds their pair's

    @classmethod
    def of(cls, bank: GraphBank, q: Tensor, k: Tensor, kv_head: Tensor) -> "Buckets":
        """Q's scale is measured over the chunk's rows, K's over all keys given, as the authors do.

        Which bucket serves a chunk is therefore the one thing that depends on the chunk as a whole.
        """
        measured = torch.stack([absmax_scales(q), absmax_scales(k)[kv_head]], 1)
        pairs = [bank.nearest(*scales) for scales in measured.tolist()]
        scales = torch.tensor([bank.pairs[pair] for pair in pairs])
        clipped = int((measured.double() > torch.tensor([bank.pairs[pair] for pair in pairs], dtype=torch.float64)).any(1).sum())
        return cls(pairs, scales[:, 0], scales[:, 1], clipped)

    def launches(self, bank: GraphBank, kv_head: Tensor, kind: list | None = None) -> list[tuple[list[int], int]]:
        """(heads, size) of every launch: heads of one slot, and of one key head where the bank folds groups.

        `kind` [H] keeps further heads apart.
        """
        together = defaultdict(list)
        for head, (pair, kv) in enumerate(zip(self.pairs, kv_head.tolist(), strict=True)):
            keys = (kv, bank.pairs[pair][1]) if bank.group > 1 else None
            together[bank.slot(pair), keys, kind[head] if kind else None].append(head)
        plan = []
        for members in together.values():
            for taken, size in launches(len(members), bank.launch_heads):
                plan.append((members[:taken], size))
                members = members[taken:]
        return plan


@dataclass
class Int8:
    """Scores from the bank. Heads whose scales fall into one bucket share launches.

    For work that holds the bank (`exclusive`), what `estimate` returns is valid until the next call: where one launch serves
    all heads, it is the bank's own output. For others it is a copy.
    """

    bank: GraphBank
    scores_are_finite: ClassVar[bool] = True  # products of integers
    clipped: int = field(default=0, init=False)  # heads whose measured Q or K scale exceeded their bucket's
    launched: int = field(default=0, init=False)
    _scores: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def device(self) -> str:
        """Where the graphs run, as OpenVINO names it."""
        return self.bank.device

    @property
    def exclusive(self) -> Exclusive:
        """The bank's: estimators of one bank share its memory."""
        return self.bank.exclusive

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor, heads: Heads | None = None) -> Tensor:
        with self.exclusive.use() as outermost:
            kv_head = (heads or Heads.all(q.shape[0], k.shape[0])).kv
            scores = self._estimate(q, k, kv_head, first_row=int(positions[0]))
            return scores.clone() if outermost else scores

    def _estimate(self, q: Tensor, k: Tensor, kv_head: Tensor, *, first_row: int) -> Tensor:
        buckets = Buckets.of(self.bank, q, k, kv_head)
        self.clipped += buckets.clipped
        plan = buckets.launches(self.bank, kv_head)
        self.launched += len(plan)
        if len(plan) == 1:
            return launch(self.bank, *plan[0], q, k, kv_head, buckets, first_row=first_row)
        for members, size in plan:
            part = launch(self.bank, members, size, q, k, kv_head, buckets, first_row=first_row)
            scores = self._memory(part, q.shape[0])
            scores[members] = part
        return scores

    def _memory(self, part: Tensor, heads: int) -> Tensor:
        """Room for the scores of `heads` heads, kept between calls: the first touch of fresh memory takes longer than a copy."""
        if self._scores is None or self._scores.dtype != part.dtype or self._scores.numel() < heads * part[0].numel():
            with torch.inference_mode(False):  # as in `Arena`
                self._scores = part.new_empty(heads * part[0].numel())
        return self._scores[: heads * part[0].numel()].view(heads, *part.shape[1:])

    def units(self, q: Tensor, k: Tensor, *, layer: int, heads: Heads) -> Tensor:
        """As `Scaled.units`: 1 where the graphs multiply by the scales, else a step of the product or of an INT8 score."""
        buckets, form = Buckets.of(self.bank, q, k, heads.kv), self.bank.form
        if form.requant is not None:
            return torch.tensor([form.requant.output_scale(*self.bank.pairs[pair]) for pair in buckets.pairs])
        if form.bakes_scales:
            return torch.ones(len(heads))
        return buckets.q_scales * buckets.k_scales

    def groups(self, q: Tensor, k: Tensor, *, heads: Heads) -> tuple[list[Group], Buckets]:
        """As `Launcher.groups`: heads whose scales fall into one bucket, as many as the bank launches at once."""
        buckets = Buckets.of(self.bank, q, k, heads.kv)
        with self.exclusive.use():
            self.clipped += buckets.clipped
        plan = buckets.launches(self.bank, heads.kv)
        return [Group(tuple(members), self.bank.slot(buckets.pairs[members[0]])) for members, _ in plan], buckets

    def launch(self, q: Tensor, k: Tensor, group: Group, known: Buckets, *, positions: Tensor, heads: Heads) -> Tensor:
        """As `Launcher.launch`."""
        ((_, size),) = launches(len(group.heads), self.bank.launch_heads)
        with self.exclusive.use() as outermost:
            self.launched += 1
            scores = launch(self.bank, list(group.heads), size, q, k, heads.kv, known, first_row=int(positions[0]))
            return scores.clone() if outermost else scores


def launch(
    bank: GraphBank, members: list[int], size: int, q: Tensor, k: Tensor, kv_head: Tensor, buckets: Buckets, *,
    first_row: int, top_k: int = 0,
) -> Tensor:  # fmt: skip
    """One launch: what the graph for these heads returns, see `Graph.run`."""
    _, rows, dim = q.shape
    pair = buckets.pairs[members[0]]
    graph = bank.lookup(*bank.pairs[pair], heads=size, rows=rows, keys=k.shape[1], head_dim=dim, top_k=top_k)
    read = members[:1] if graph.shape.group > 1 else members
    all_heads = len(members) == q.shape[0]
    return graph.run(
        q if all_heads else q[members],
        k[kv_head[read]],
        q_scales=buckets.q_scales[members],
        k_scales=buckets.k_scales[read],
        first_row=first_row,
    )
