"""INT8 scores with scales taken from the tensors themselves: what `sparse_attention` uses without a bank."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import openvino as ov
import torch
from torch import Tensor

from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.cpu import cpu_hints
from shadowattn.graphs.estimation import GraphForm, estimation_graph
from shadowattn.graphs.quantize import absmax_scales, quantize
from shadowattn.threads import compile_hints, current_budget, thread_budget
from shadowattn.types import Heads


@dataclass(frozen=True)
class Int8Tensor:
    """One scale for each query head and one for each key head, fixed for all rows; they leave the order of a row alone."""

    q_scales: Tensor  # float32 [H]
    k_scales: Tensor  # float32 [G]
    scores_are_finite: ClassVar[bool] = True  # products of integers

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> "Int8Tensor":
        """Absmax scales of q [H, Q, D] and k [G, K, D]."""
        return cls(absmax_scales(q), absmax_scales(k))

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor, heads: Heads | None = None) -> Tensor:
        """The integer products, exact in float32."""
        heads = heads or Heads.all(q.shape[0], k.shape[0])
        scores = np.empty((*q.shape[:2], k.shape[1]), np.float32)
        q8 = quantize(q, self.q_scales[heads.ids])
        groups = [(slice(group, group + 1), part) for group, part in heads.grouped()]
        span = slice(groups[0][0].start, groups[-1][0].stop)
        if len({part.stop - part.start for _, part in groups}) == 1 and span.stop - span.start == len(groups):
            groups = [(span, slice(0, len(heads)))]  # neighbouring groups of one size share a launch
        for group, part in groups:
            # A group's query heads fold into rows: they share their keys, so K is not repeated.
            k8 = quantize(k[group], self.k_scales[group])[None]
            rows = q8[part].reshape(1, k8.shape[1], -1, q8.shape[2])
            _multiply(rows, k8, scores[part].reshape(1, k8.shape[1], -1, k.shape[1]))
        return torch.from_numpy(scores)

    def units(self, q: Tensor, k: Tensor, *, layer: int, heads: Heads) -> Tensor:
        """As `Scaled.units`: a step of the integer product."""
        return self.q_scales[heads.ids] * self.k_scales[heads.kv]


def _multiply(q8: Tensor, k8: Tensor, scores: np.ndarray) -> None:
    """Products of q8 [1, G, rows, D] and k8 [1, G, K, D] into scores [1, G, rows, K]."""
    _, groups, rows, dim = q8.shape
    request = _compiled(GraphShape(groups, rows, dim, k8.shape[2]), current_budget()).create_infer_request()
    inputs = [x.contiguous().numpy() for x in (q8, k8)]  # held until the request is done: OpenVINO keeps only their addresses
    for index, x in enumerate(inputs):
        request.set_input_tensor(index, ov.Tensor(x, shared_memory=True))
    request.set_output_tensor(0, ov.Tensor(scores, shared_memory=True))
    request.infer(share_outputs=True)


@lru_cache(maxsize=16)
def _compiled(shape: GraphShape, threads: int | None) -> ov.CompiledModel:
    with thread_budget(threads):
        hints = cpu_hints() | compile_hints()
        return ov.Core().compile_model(estimation_graph(shape, GraphForm("unit")), "CPU", hints)
