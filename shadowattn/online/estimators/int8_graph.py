"""The paper's estimator: INT8 Q·K from a bank of static graphs, picked by each head's measured scales (section 3.3)."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import launches
from shadowattn.graphs.symmetric_int8 import absmax_scales, offset_of
from shadowattn.online.chunk import Chunk, as_slice, largest_key_scales
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.plan import Group
from shadowattn.types import EstimateCost


@dataclass(frozen=True)
class Buckets:
    """The scale pair that serves each of some heads, by index and by value."""

    pairs: list[int]
    q_scales: Tensor  # float32 [H], of the pairs
    k_scales: Tensor
    clipped: list[bool]  # whether a head's measured Q or K scale exceeds its pair's

    @classmethod
    def of(cls, bank: GraphBank, chunk: Chunk) -> "Buckets":
        """Q's scale is measured over the chunk's rows, K's over all keys so far, as the authors do.

        Which bucket serves a chunk is therefore the one thing that depends on the chunk as a whole. Keys are those less the
        bank's key offset.
        """
        k_scales = largest_key_scales(chunk, bank.key_offset)
        measured = torch.stack([absmax_scales(chunk.q), k_scales[chunk.heads.kv]], 1)
        pairs = [bank.nearest(*scales) for scales in measured.tolist()]
        scales = torch.tensor([bank.pairs[pair] for pair in pairs])
        exceeded = measured.double() > torch.tensor([bank.pairs[pair] for pair in pairs], dtype=torch.float64)
        return cls(pairs, scales[:, 0], scales[:, 1], exceeded.any(1).tolist())

    def launches(self, bank: GraphBank, chunk: Chunk, kind: list | None = None) -> list[tuple[list[int], int]]:
        """(heads, size) of every launch of the chunk: heads of one slot, and of one key head where the bank folds groups.

        `kind` [H] keeps further heads apart.
        """
        together = defaultdict(list)
        for head, (pair, kv) in enumerate(zip(self.pairs, chunk.heads.kv.tolist(), strict=True)):
            keys = (kv, bank.pairs[pair][1]) if bank.group > 1 else None
            together[bank.slot(pair), keys, kind[head] if kind else None].append(head)
        plan, sizes = [], _sizes(bank, chunk)
        for members in together.values():
            for taken, size in launches(len(members), sizes):
                plan.append((members[:taken], size))
                members = members[taken:]
        return plan


class OfBank:
    """What estimators by a bank of graphs share."""

    bank: GraphBank

    def __post_init__(self):
        checks.instance("bank", self.bank, GraphBank, "build one with GraphBank.build")

    @property
    def graphs(self) -> GraphBank:
        return self.bank

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(head_dim, 8) + EstimateCost.quantising(head_dim, keys=keys, offset=self.bank.key_offset)


@dataclass
class Int8Graph(OfBank, Estimator):
    """Scores from the bank. Heads whose scales fall into one bucket share launches.

    For work that holds the bank (`use`), scores are valid until the next call: where one launch serves all heads, they are
    the bank's own output. For others they are a copy. Where the bank's scales are those of shifted keys, its key offset is
    subtracted as keys are copied to a graph.
    """

    bank: GraphBank
    needs: ClassVar[frozenset[str]] = frozenset({"bank"})
    reads_cpu_memory: ClassVar[bool] = True
    scores_are_finite: ClassVar[bool] = True  # products of integers
    is_papers: ClassVar[bool] = True
    clipped: int = field(default=0, init=False)  # heads whose measured Q or K scale exceeded their bucket's
    launched: int = field(default=0, init=False)
    _kept: Tensor | None = field(default=None, init=False, repr=False)

    def scores(self, chunk: Chunk) -> Tensor:
        with self.use() as outermost:
            scores = self._scores(chunk)
            return scores.clone() if outermost else scores

    def _scores(self, chunk: Chunk) -> Tensor:
        buckets = self._buckets(chunk)
        plan = buckets.launches(self.bank, chunk)
        self.launched += len(plan)
        self.clipped += sum(buckets.clipped)
        if len(plan) == 1:
            return launch(self.bank, *plan[0], chunk, buckets)
        for members, size in plan:
            part = launch(self.bank, members, size, chunk, buckets)
            scores = self._memory(part, len(chunk.heads))
            scores[members] = part
        return scores

    def _buckets(self, chunk: Chunk) -> Buckets:
        return chunk.once(("buckets", self.bank), lambda: Buckets.of(self.bank, chunk))

    def _memory(self, part: Tensor, heads: int) -> Tensor:
        """Room for the scores of `heads` heads, kept between calls: the first touch of fresh memory takes longer than a copy."""
        if self._kept is None or self._kept.dtype != part.dtype or self._kept.numel() < heads * part[0].numel():
            with torch.inference_mode(False):  # as in `Arena`
                self._kept = part.new_empty(heads * part[0].numel())
        return self._kept[: heads * part[0].numel()].view(heads, *part.shape[1:])

    def units(self, chunk: Chunk) -> Tensor:
        """1 where the graphs multiply by the scales, else a step of the product or of an INT8 score."""
        buckets, form = self._buckets(chunk), self.bank.form
        if form.requant is not None:
            return torch.tensor([form.requant.output_scale(*self.bank.pairs[pair]) for pair in buckets.pairs])
        if form.bakes_scales:
            return torch.ones(len(chunk.heads))
        return buckets.q_scales * buckets.k_scales * form.score_steps

    def prepare(self, chunk: Chunk) -> None:
        self._buckets(chunk)

    def launches(self, chunk: Chunk) -> list[Group]:
        """Heads whose scales fall into one bucket, as many as the bank launches at once."""
        buckets = self._buckets(chunk)
        plan = buckets.launches(self.bank, chunk)
        return [Group(tuple(members), self.bank.slot(buckets.pairs[members[0]])) for members, _ in plan]

    def launch(self, chunk: Chunk, group: Group, *, out: Tensor | None = None) -> Tensor:
        with self.use() as outermost:
            buckets = self._buckets(chunk)
            self.launched += 1
            self.clipped += sum(buckets.clipped[head] for head in group.heads)
            scores = launch(self.bank, list(group.heads), self._size(chunk, group), chunk, buckets, out=out)
            return scores.clone() if outermost and out is None else scores

    def room(self, chunk: Chunk, group: Group) -> int | None:
        """On a CPU, what the graph computes, padding included. Another device's driver would map every new memory first."""
        if self.bank.device != "CPU":
            return None
        (_, rows, dim), size = chunk.q.shape, self._size(chunk, group)
        return self.bank.form.output_bytes(self.bank.shape_for(heads=size, rows=rows, keys=chunk.keys, head_dim=dim))

    def _size(self, chunk: Chunk, group: Group) -> int:
        ((_, size),) = launches(len(group.heads), _sizes(self.bank, chunk))
        return size


def _sizes(bank: GraphBank, chunk: Chunk) -> list[int]:
    """How many of the chunk's heads may share a launch."""
    _, rows, dim = chunk.q.shape
    return bank.launch_heads_for(rows, chunk.keys, dim)


def launch(
    bank: GraphBank,
    members: list[int],
    size: int,
    chunk: Chunk,
    buckets: Buckets,
    *,
    top_k: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """One launch: what the graph for these heads of the chunk returns, in `out` if given, see `Graph.run`."""
    count, rows, dim = chunk.q.shape
    pair = bank.pairs[buckets.pairs[members[0]]]
    graph = bank.lookup(*pair, heads=size, rows=rows, keys=chunk.keys, head_dim=dim, top_k=top_k)
    read = members[:1] if graph.shape.group > 1 else members
    groups = as_slice(chunk.heads.kv[read], chunk.k.device)
    offset = offset_of(chunk.k, bank.key_offset, chunk.layer)
    return graph.run(
        chunk.q if len(members) == count else chunk.q[members],
        chunk.k[groups],
        q_scales=buckets.q_scales[members],
        k_scales=buckets.k_scales[read],
        k_offset=None if offset is None else offset[groups],
        first_position=chunk.first_position,
        out=out,
    )
