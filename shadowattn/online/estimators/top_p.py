"""Top-p after a loose top-k: rows of concentrated attention keep fewer keys (Twilight, arXiv 2502.02770, section 4)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.graphs.symmetric_int8 import shifted
from shadowattn.kernels import Kernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator, check_lists, check_scores
from shadowattn.online.estimators.per_token import token_integers
from shadowattn.online.selection import Rule
from shadowattn.types import EstimateCost, KeyOffset, Lists, Selection


@dataclass(frozen=True)
class TopP(Estimator):
    """Of the keys that `estimator` keeps at `loose` times the retention, a row keeps the fewest whose weights sum to `top_p`.

    Weights are the softmax, over the loose list, of q·k with keys of 4 bits less the calibrated `key_offset`. The rule's sinks
    and its recent window are kept, and so many others that the row has its `min_budget`; ties go to the lower index. So rows,
    heads and layers keep different numbers of keys: `offline.top_p.observe_top_p` finds the `top_p` at which their mean over
    calibration text is that of the budget, and what a run keeps is its measured density.

    Departures: the paper's 4-bit keys have a zero point; it decodes, here every row of a prompt is pruned; it prunes a quarter of
    the keys, whatever the budget; it leaves the first two layers dense (`allocator=first_layers_dense`).
    """

    estimator: Estimator
    top_p: float
    loose: float = 4.0
    key_offset: KeyOffset | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"top_p", "key_offset"})
    sets_budgets: ClassVar[bool] = True

    def __post_init__(self):
        checks.instance("estimator", self.estimator, Estimator, "give the estimator whose ranking is pruned")
        _check_within(type(self.estimator), has_graphs=self.estimator.graphs is not None)
        if not 0 < checks.number("top_p", self.top_p) <= 1:
            raise InputError(f"top_p: expected a share of the weights in (0, 1], got {self.top_p}")
        _check_loose(self.loose)
        object.__setattr__(self, "key_offset", KeyOffset.read(self.key_offset))
        object.__setattr__(self, "sees", self.estimator.sees)

    @classmethod
    def check_settings(
        cls, head_dim: int, kv_heads: int, /, *, estimator: type[Estimator] = Estimator, loose: float = 1.0, **others: Any
    ) -> None:
        _check_within(estimator, has_graphs=not estimator.needs.isdisjoint(("bank", "nncf_graph")))
        _check_loose(loose)

    @property
    def made_for(self) -> str:
        return self.estimator.made_for

    def scores(self, chunk: Chunk) -> Tensor:
        return self.estimator.scores(chunk)

    def units(self, chunk: Chunk) -> Tensor | None:
        return self.estimator.units(chunk)

    def counts(self) -> dict[str, float]:
        return self.estimator.counts()

    @property
    def goes_by(self) -> str:
        return self.estimator.goes_by

    @property
    def ranked_together(self) -> tuple[int, int]:
        return self.estimator.ranked_together

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost | None:
        """The ranking's, and the 4-bit products, with a scale for each key, and the sums of their softmax, as if of every key."""
        ranking = self.estimator.cost(head_dim, rows, keys)
        offset = head_dim * (self.key_offset is not None)
        of_key = EstimateCost.of(1, 32) + EstimateCost.deriving(2 * head_dim + offset, keys=keys)
        return ranking and ranking + EstimateCost.of(head_dim, 4) + of_key + EstimateCost.adding(2)

    def select(self, chunk: Chunk, rule: Rule, lists: Lists, kernels: Kernels) -> Selection:
        """Lists of lengths of their own, for single rows: `lists` says whose."""
        check_rows(rule)
        loose = loose_lists(chunk, self.estimator, rule, kernels, self.loose)
        keys, kept = four_bit_keys(chunk, self.key_offset), []
        for head in range(len(chunk.heads)):
            members, weights = loose_weights(chunk, loose, slice(head, head + 1), keys)
            order, before = ranked(weights, members, forced(chunk, rule), rule.min_budget)
            kept.append(torch.zeros_like(members).scatter(-1, order, before < self.top_p)[0])
        counts = torch.stack([head.sum(1) for head in kept])
        indices = torch.cat([head.nonzero()[:, 1] for head in kept]).to(torch.int32)
        indptr = torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0))
        return Selection(indices, indptr, lists.positions, 1)


def _check_within(kind: type[Estimator], *, has_graphs: bool) -> None:
    if kind.sets_budgets or has_graphs or kind.reads_cpu_memory:
        raise InputError(
            f"top_p: cannot prune the lists of {kind.__name__}, which has static graphs or budgets of its own; give an estimator "
            "that ranks by itself, such as oracle or quantised"
        )


def check_rows(rule: Rule) -> None:
    """Raises `InputError` where rows share lists."""
    if rule.query_block != 1:
        raise InputError(f"top_p: prunes the lists of single rows, got query_block={rule.query_block}; use query_block=1")


def _check_loose(loose: float) -> None:
    if checks.number("loose", loose) < 1:
        raise InputError(f"loose: expected 1 or more times the budget, got {loose}")


def loose_lists(chunk: Chunk, estimator: Estimator, rule: Rule, kernels: Kernels, loose: float) -> Selection:
    """What an estimator keeps of `loose` times the chunk's retention, up to every key."""
    lists = rule.lists((chunk.retention * loose).clamp(max=1.0), chunk.positions)
    if estimator.selects:
        return check_lists(estimator.select(chunk, rule, lists, kernels), lists, estimator)
    return kernels.select(check_scores(estimator.scores(chunk), estimator, chunk), lists)


def four_bit_keys(chunk: Chunk, key_offset: KeyOffset | None) -> Tensor:
    """The chunk's keys less the offset, in 15 steps of a symmetric 4-bit scale of each key's own; float32 [G, K, D]."""
    integers, scales = token_integers(shifted(chunk.k, key_offset, chunk.layer).float(), 4)
    return integers * scales


def loose_weights(chunk: Chunk, loose: Selection, heads: slice, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Which keys are on the loose lists of some heads, bool, and their weights, float32 with zeros elsewhere; [h, Q, K].

    By `keys` float32 [G, K, D] in place of the chunk's own.
    """
    rows, some = len(loose.positions), chunk[heads]
    of_list = torch.arange(heads.start * rows, heads.stop * rows, device=loose.indptr.device)
    start, end = (int(loose.indptr[at * rows]) for at in (heads.start, heads.stop))
    lengths = loose.indptr.diff()[of_list]
    members = torch.zeros(len(of_list), chunk.keys, dtype=torch.bool, device=lengths.device)
    members[(of_list - heads.start * rows).repeat_interleave(lengths), loose.indices[start:end].long()] = True
    members = members.view(len(some.heads), rows, chunk.keys)
    logits = some.q.float() @ keys[some.heads.kv].mT * chunk.scale
    return members, torch.softmax(logits.masked_fill(~members, -torch.inf), -1)


def ranked(weights: Tensor, members: Tensor, anyway: Tensor, min_budget: int) -> tuple[Tensor, Tensor]:
    """Keys in order, int64 [..., K], and the share of the weights above which a row keeps each of them, float64.

    A key is kept where the weights of those before it sum to less than the share. Members come first that are kept `anyway`, bool
    like `members` or without its first dimension, and then the largest weights, ties to the lower index. At least `min_budget`
    members are kept at any share, which is −1 for them; for what is no member it is 2.
    """
    weights, order = weights.double().masked_fill(~members, -1.0).sort(dim=-1, descending=True, stable=True)
    share = (weights.clamp(min=0).cumsum(-1) - weights.clamp(min=0)).masked_fill(weights < 0, 2.0)
    share = share.masked_fill((anyway & members).gather(-1, order), -1.0)
    share, again = share.sort(dim=-1, stable=True)
    share[..., :min_budget] = torch.where(share[..., :min_budget] < 2, -1.0, 2.0)
    return order.gather(-1, again), share


def forced(chunk: Chunk, rule: Rule) -> Tensor:
    """Sinks and the recent window, bool [Q, K]."""
    key, position = torch.arange(chunk.keys, device=chunk.positions.device), chunk.positions[:, None]
    return (key < rule.sinks) | (key > position - rule.recent) & (key <= position)
