"""The output layer with INT8 weights, as graphs of fixed numbers of rows."""

import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor

from shadowattn.graphs.core import core
from shadowattn.graphs.estimation import INT8_MAX

_LEAST = torch.finfo(torch.float32).tiny


class Int8Head:
    """Logits of the output layer's `weight` [V, E] in INT8, one scale a row; products and sums are float32.

    A graph is compiled for each of `heights`, numbers of rows, when it is first needed.
    """

    def __init__(self, weight: Tensor, heights: tuple[int, ...], device: str = "CPU"):
        scales = weight.float().abs().amax(1, keepdim=True).clamp(min=_LEAST) / INT8_MAX
        self._integers, self._scales = (weight.float() / scales).round().to(torch.int8), scales
        self._heights, self._device = sorted(set(heights)), device
        self._requests: dict[int, ov.InferRequest] = {}

    def __call__(self, hidden: Tensor) -> Tensor:
        """float32 [n, V] of float32 [n, E]; more rows than the greatest height go through in pieces of it."""
        return torch.cat([self._piece(piece) for piece in hidden.split(self._heights[-1])])

    def _piece(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        height = next(height for height in self._heights if height >= rows)
        if height not in self._requests:
            self._requests[height] = self._compiled(height).create_infer_request()
        filled = torch.nn.functional.pad(hidden, (0, 0, 0, height - rows))
        (logits,) = self._requests[height].infer([filled.numpy()]).values()
        return torch.from_numpy(logits)[:rows]

    def _compiled(self, rows: int) -> ov.CompiledModel:
        hidden = op.parameter([rows, self._integers.shape[1]], ov.Type.f32, "hidden")
        weight = op.multiply(op.convert(op.constant(self._integers.numpy()), ov.Type.f32), op.constant(self._scales.numpy()))
        graph = ov.Model([op.result(op.matmul(hidden, weight, False, True))], [hidden], "head")
        hints = {}
        if self._device == "CPU":
            hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
            hints["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # else activations are rounded to INT8 too
        return core().compile_model(graph, self._device, hints)
