"""How faithful the sparse path is to dense attention, layer by layer, on the Q, K and V that the sparse model really has."""

from dataclasses import replace

import torch
from torch import Tensor

from shadowattn.kernels import Kernels, TorchKernels, choose
from shadowattn.online.attention import Attended
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.selection import Rule
from shadowattn.types import Selection


class OutputError:
    """‖output − dense‖ / ‖dense‖ of attention outputs, over all chunks. Called as an observer of `FullInt8`."""

    def __init__(self):
        self._error = self._norm = 0.0

    def __call__(self, chunk: Chunk, out: Tensor) -> None:
        how = {"causal_offset": chunk.first_position, "scale": chunk.scale}
        exact = TorchKernels().dense(chunk.q, chunk.k, chunk.v, chunk.heads, **how).double()
        self._error += float((out.double() - exact).square().sum())
        self._norm += float(exact.square().sum())

    def exact(self, out: Tensor) -> None:
        """Counts an output that is dense attention's own."""
        self._norm += float(out.double().square().sum())

    def metrics(self) -> dict[str, float]:
        """The error by name; empty where nothing was seen."""
        return {"output_error": (self._error / self._norm) ** 0.5} if self._norm else {}


class Fidelity:
    """An observer of `SparseAttention`. Its sums run over chunks, so it holds at most one chunk × keys per head.

    `mass_recall`: share of dense attention's probability that falls on the kept keys, mean over rows and heads.
    `topk_overlap`: share of the exact top-k (same budget, same granularity) that the estimate found, over sparse heads.
    `worst_head_overlap`: the same of the head that is served worst.
    `row_overlap`, where rows share lists: share of each row's own exact top-k, of as many keys as it attends to, that its list
    holds. Lists by exact scores have it below 1: it is what sharing misses, with what the estimate does.
    `output_error`: ‖sparse − dense‖ / ‖dense‖ of the attention outputs, over all heads.
    """

    def __init__(self):
        self._mass = self._rows = 0.0
        self._own = self._shared = 0
        self._found: dict[tuple[int, int], list[int]] = {}  # by layer and head: keys of the exact top-k that were found, and all
        self._output = OutputError()

    def __call__(self, seen: Attended) -> None:
        chunk = seen.chunk
        heads, rows, _ = chunk.q.shape
        self._rows += heads * rows
        if seen.selection is None:
            self._mass += heads * rows
            self._output.exact(seen.out)
            return
        kernels = choose("auto", head_dim=chunk.q.shape[2], dtype=chunk.q.dtype, device=chunk.q.device)
        lists = seen.rule.lists(chunk.retention, chunk.positions)
        if seen.rule.query_block == 1:  # an estimator may give rows budgets of their own
            lists = replace(lists, indptr=seen.selection.indptr)
        best = _as_mask(_Exact().select(chunk, seen.rule, lists, kernels), chunk.keys)  # by the same rule
        kept = _as_mask(seen.selection, chunk.keys)
        wanted = best.flatten(1).count_nonzero(1).tolist()
        found = best.logical_and_(kept).flatten(1).count_nonzero(1).tolist()
        for head, *counts in zip(chunk.heads.ids.tolist(), found, wanted, strict=True):
            sums = self._found.setdefault((chunk.layer, head), [0, 0])
            sums[:] = (one + more for one, more in zip(sums, counts, strict=True))
        if seen.rule.query_block > 1:
            own = _as_mask(_own_best(chunk, seen.rule, kept.sum(-1), kernels), chunk.keys)
            self._shared += int(own.count_nonzero())
            self._own += int(own.logical_and_(kept).count_nonzero())
        probabilities = _probabilities(_Exact().scores(chunk) * chunk.scale, chunk.positions)
        self._mass += float(probabilities.mul_(kept).sum())
        self._output(chunk, seen.out)

    def metrics(self) -> dict[str, float]:
        """The figures by name; empty where no chunk took the sparse path."""
        if not self._found:
            return {}
        found, wanted = (sum(sums) for sums in zip(*self._found.values(), strict=True))
        return {
            "mass_recall": self._mass / self._rows,
            "topk_overlap": found / wanted,
            "worst_head_overlap": min(head_found / head_wanted for head_found, head_wanted in self._found.values()),
            **({"row_overlap": self._own / self._shared} if self._shared else {}),
            **self._output.metrics(),
        }


class _Exact(Oracle):
    """Exact scores, computed once for a chunk."""

    units = Oracle.units

    def scores(self, chunk: Chunk) -> Tensor:
        return chunk.once("exact scores", lambda: super(_Exact, self).scores(chunk))


def _own_best(chunk: Chunk, rule: Rule, counts: Tensor, kernels: Kernels) -> Selection:
    """The best `counts` [H, Q] keys of each row by itself, by exact scores."""
    rule = Rule(sinks=rule.sinks, recent=rule.recent)
    lists = rule.lists(chunk.retention, chunk.positions)
    lists = replace(lists, indptr=torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0)))
    return _Exact().select(chunk, rule, lists, kernels)


def _probabilities(logits: Tensor, positions: Tensor) -> Tensor:
    """The softmax of each row over the keys that it sees; overwrites `logits`."""
    hidden = torch.arange(logits.shape[-1], device=logits.device) > positions[:, None]
    return torch.softmax(logits.masked_fill_(hidden, -torch.inf), -1)


def _as_mask(selection: Selection, keys: int) -> Tensor:
    """bool [H, Q, K] of one chunk: for measuring only."""
    device = selection.indices.device
    lists = torch.zeros(len(selection.indptr) - 1, keys, dtype=torch.bool, device=device)
    lists[torch.arange(len(lists), device=device).repeat_interleave(selection.indptr.diff()), selection.indices] = True
    if selection.query_block == 1:  # a row's own list holds nothing that it does not see
        return lists.view(-1, selection.blocks, keys)
    rows = torch.arange(len(selection.positions), device=device) // selection.query_block
    seen = torch.arange(keys, device=device) <= selection.positions[:, None]
    return lists.view(-1, selection.blocks, keys)[:, rows] & seen
