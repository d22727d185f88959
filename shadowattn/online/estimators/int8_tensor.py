"""INT8 scores with scales taken from the tensors themselves: what `sparse_attention` uses without a bank."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import openvino as ov
import torch
from torch import Tensor

from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.estimation import INT8_MAX, unit_graph
from shadowattn.online.estimators.int8 import absmax_scales


@dataclass(frozen=True)
class Int8Tensor:
    """One scale for each query head and one for each key head, fixed for all rows; they leave the order of a row alone."""

    q_scales: Tensor  # float32 [H]
    k_scales: Tensor  # float32 [G]

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> "Int8Tensor":
        """Absmax scales of q [H, Q, D] and k [G, K, D]."""
        return cls(absmax_scales(q), absmax_scales(k))

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor) -> Tensor:
        """The integer products, exact in float32."""
        heads, rows, dim = q.shape
        groups, keys, _ = k.shape
        # A group's query heads fold into rows: they share their keys, so K is not repeated.
        q8 = quantize(q, self.q_scales).reshape(1, groups, heads // groups * rows, dim)
        k8 = quantize(k, self.k_scales)[None]
        request = _compiled(GraphShape(groups, q8.shape[2], dim, keys)).create_infer_request()
        for index, x in enumerate((q8, k8)):
            request.set_input_tensor(index, ov.Tensor(x.numpy(), shared_memory=True))
        scores = np.empty((1, groups, q8.shape[2], keys), np.float32)
        request.set_output_tensor(0, ov.Tensor(scores, shared_memory=True))
        request.infer(share_outputs=True)
        return torch.from_numpy(scores).view(heads, rows, keys)


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """int8 of x [heads, rows, D]: round half to even of x / scale, clipped to ±127."""
    return torch.round(x.float() / scales[:, None, None]).clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


@lru_cache(maxsize=16)
def _compiled(shape: GraphShape) -> ov.CompiledModel:
    return ov.Core().compile_model(unit_graph(shape), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
