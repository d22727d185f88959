"""How faithful the sparse path is to dense attention, layer by layer: on the Q, K and V that the sparse model really has, and on
those of dense attention."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.budget import head_retentions
from shadowattn.engine.observe import observe_prefill
from shadowattn.kernels import Kernels, TorchKernels, choose
from shadowattn.online.attention import Attended
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator, check_lists
from shadowattn.online.estimators.base import check_place
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.selection import Rule
from shadowattn.types import Selection


class OutputError:
    """‖output − dense‖ / ‖dense‖ of attention outputs, over all chunks. Called as an observer of `FullInt8`."""

    def __init__(self):
        self._sums: dict[int, list[float]] = {}  # of each layer the squares of the error and of dense attention's output

    def __call__(self, chunk: Chunk, out: Tensor) -> None:
        how = {"causal_offset": chunk.first_position, "scale": chunk.scale}
        exact = TorchKernels().dense(chunk.q, chunk.k, chunk.v, chunk.heads, **how).double()
        self._add(chunk.layer, float((out.double() - exact).square().sum()), float(exact.square().sum()))

    def exact(self, layer: int, out: Tensor) -> None:
        """Counts an output that is dense attention's own."""
        self._add(layer, 0.0, float(out.double().square().sum()))

    def metrics(self) -> dict[str, float]:
        """The error over all layers by name; empty where nothing was seen."""
        error, norm = (sum(sums) for sums in zip(*self._sums.values(), strict=True)) if self._sums else (0.0, 0.0)
        return {"output_error": (error / norm) ** 0.5} if norm else {}

    def layers(self) -> dict[int, float]:
        """The error of each layer that was seen."""
        return {layer: (error / norm) ** 0.5 for layer, (error, norm) in sorted(self._sums.items()) if norm}

    def _add(self, layer: int, error: float, norm: float) -> None:
        sums = self._sums.setdefault(layer, [0.0, 0.0])
        sums[:] = sums[0] + error, sums[1] + norm


class Lists:
    """How good lists are by the queries and keys that they were made of. Its sums run over chunks, so it holds at most one
    chunk × keys per head.

    `mass_recall`: share of dense attention's probability that falls on the kept keys, mean over rows and heads.
    `topk_overlap`: share of the exact top-k (same budget, same granularity) that the estimate found, over sparse heads.
    `worst_head_overlap`: the same of the head that is served worst.
    `worst_head_mass`: the mass recall of the sparse head that has the least.
    `row_overlap`, where rows share lists: share of each row's own exact top-k, of as many keys as it attends to, that its list
    holds. Lists by exact scores have it below 1: it is what sharing misses, with what the estimate does.
    """

    def __init__(self):
        self._mass = self._rows = 0.0
        self._own = self._shared = 0
        # By layer and head: keys of the exact top-k that were found, and all; the rows' probability on kept keys, and the rows.
        self._heads: dict[tuple[int, int], list[float]] = {}

    def add(self, chunk: Chunk, rule: Rule, selection: Selection | None) -> None:
        """What a chunk's heads keep; None: every key."""
        heads, rows, _ = chunk.q.shape
        self._rows += heads * rows
        if selection is None:
            self._mass += heads * rows
            return
        kernels = choose("auto", head_dim=chunk.q.shape[2], dtype=chunk.q.dtype, device=chunk.q.device)
        lists = rule.lists(chunk.retention, chunk.positions)
        if rule.query_block == 1:  # an estimator may give rows budgets of their own
            lists = replace(lists, indptr=selection.indptr)
        best = _as_mask(_Exact().select(chunk, rule, lists, kernels), chunk.keys)  # by the same rule
        kept = _as_mask(selection, chunk.keys)
        wanted = best.flatten(1).count_nonzero(1).tolist()
        found = best.logical_and_(kept).flatten(1).count_nonzero(1).tolist()
        if rule.query_block > 1:
            own = _as_mask(_own_best(chunk, rule, kept.sum(-1), kernels), chunk.keys)
            self._shared += int(own.count_nonzero())
            self._own += int(own.logical_and_(kept).count_nonzero())
        probabilities = _probabilities(_Exact().scores(chunk) * chunk.scale, chunk.positions)
        mass = probabilities.mul_(kept).flatten(1).sum(1, dtype=torch.float64).tolist()
        self._mass += sum(mass)
        for head, *counts in zip(chunk.heads.ids.tolist(), found, wanted, mass, strict=True):
            sums = self._heads.setdefault((chunk.layer, head), [0, 0, 0.0, 0])
            sums[:] = (one + more for one, more in zip(sums, [*counts, rows], strict=True))

    def metrics(self) -> dict[str, float]:
        """The figures by name; empty where every chunk kept every key."""
        if not self._heads:
            return {}
        found, wanted, _, _ = (sum(sums) for sums in zip(*self._heads.values(), strict=True))
        return {
            "mass_recall": self._mass / self._rows,
            "topk_overlap": found / wanted,
            "worst_head_overlap": min(head_found / head_wanted for head_found, head_wanted, _, _ in self._heads.values()),
            "worst_head_mass": min(mass / rows for _, _, mass, rows in self._heads.values()),
            **({"row_overlap": self._own / self._shared} if self._shared else {}),
        }


class Fidelity:
    """An observer of `SparseAttention`: the figures of `Lists`, and `output_error`, ‖sparse − dense‖ / ‖dense‖ of the attention
    outputs over all heads.

    All are of the Q, K and V that the sparse model really has, which differ from dense attention's from the second layer on.
    """

    def __init__(self):
        self._lists, self._output = Lists(), OutputError()

    def __call__(self, seen: Attended) -> None:
        self._lists.add(seen.chunk, seen.rule, seen.selection)
        if seen.selection is None:
            self._output.exact(seen.chunk.layer, seen.out)
        else:
            self._output(seen.chunk, seen.out)

    def metrics(self) -> dict[str, float]:
        """The figures by name; empty where no chunk took the sparse path."""
        lists = self._lists.metrics()
        return lists | self._output.metrics() if lists else {}

    def layers(self) -> dict[int, float]:
        """The output error of each layer; empty where no chunk took the sparse path."""
        return self._output.layers() if self._lists.metrics() else {}


def measure_on_dense(
    model: PreTrainedModel,
    windows: Tensor,
    estimator: Estimator,
    retention: Sequence[Sequence[float]],
    rule: Rule,
    *,
    chunk_tokens: int,
    dense_above: float = 1.0,
) -> dict[str, float]:
    """The figures of `Lists`, with `dense_` before their names, of what an estimator would keep of dense attention's Q, K and V.

    Runs the windows int64 [W, T] through the model, dense, so that all estimators rank the same keys for the same rows and no
    layer suffers from what another lost. `retention` [L][H]; heads of `dense_above` or more keep every key.
    """
    check_place(model.device, type(estimator))
    found = Lists()

    def observe(prompt: Chunk) -> None:
        prompt = replace(prompt, retention=head_retentions(retention[prompt.layer], len(prompt.heads)).to(prompt.q.device))
        kernels = choose("auto", head_dim=prompt.q.shape[2], dtype=prompt.q.dtype, device=prompt.q.device)
        sparse = prompt.retention < dense_above
        if not sparse.all():
            found.add(prompt[(~sparse).nonzero()[:, 0].tolist()], rule, None)
        if sparse.any():
            chunk = prompt[sparse.nonzero()[:, 0].tolist()]
            lists = rule.lists(chunk.retention, chunk.positions)
            with estimator.use():
                found.add(chunk, rule, check_lists(estimator.select(chunk, rule, lists, kernels), lists, estimator))

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens)
    return {f"dense_{name}": value for name, value in found.metrics().items()}


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
