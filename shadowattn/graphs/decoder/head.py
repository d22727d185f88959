"""The output layer with INT8 weights, on the CPU."""

import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor

from shadowattn.exclusive import Exclusive
from shadowattn.graphs.core import core
from shadowattn.graphs.estimation import INT8_MAX

_LEAST = torch.finfo(torch.float32).tiny
_HINTS = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}  # 0: activations are not rounded


class Int8Head:
    """Logits of the output layer's `weight` [V, E] in INT8, one scale a row; products and sums are float32."""

    def __init__(self, weight: Tensor):
        scales = weight.float().abs().amax(1, keepdim=True).clamp(min=_LEAST) / INT8_MAX
        integers = (weight.float() / scales).round().to(torch.int8)
        hidden = op.parameter([-1, weight.shape[1]], ov.Type.f32, "hidden")
        decompressed = op.multiply(op.convert(op.constant(integers.numpy()), ov.Type.f32), op.constant(scales.numpy()))
        graph = ov.Model([op.result(op.matmul(hidden, decompressed, False, True))], [hidden], "head")
        hints = _HINTS | {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self._request = core().compile_model(graph, "CPU", hints).create_infer_request()
        self._exclusive = Exclusive()  # the request's memory belongs to one call at a time

    def __call__(self, hidden: Tensor) -> Tensor:
        """float32 [n, V] of float32 [n, E]."""
        with self._exclusive.use():
            (logits,) = self._request.infer([hidden.numpy()]).values()  # a copy
        return torch.from_numpy(logits)
