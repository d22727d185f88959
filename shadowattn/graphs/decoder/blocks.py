"""The two static graphs of a decoder layer: what comes before its attention, and what comes behind it.

Shapes are [1, rows, channels]; E hidden, F intermediate. NPUW cuts a decoder at the same places: attention reads a cache that
grows, all else has one shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as op
from torch import Tensor

from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.graphs.estimation import quantised

_F32 = ov.Type.f32
_TYPES = {"torch.float32": _F32, "torch.int8": ov.Type.i8}


@dataclass(frozen=True)
class BlockSizes:
    """What the graphs need to know of a decoder, beside its weights."""

    rows: int
    hidden: int
    attended: int  # H·D
    activation: str
    norm_eps: float


def pre_graph(sizes: BlockSizes, form: BlockForm, tensors: Mapping[str, Tensor]) -> ov.Model:
    """`hidden` [1, rows, E] → `qkv` [1, rows, (H + 2G)·D]: RMS norm and the three projections as one."""
    given = Given(form, tensors)
    hidden = given.activations("hidden", sizes.rows, sizes.hidden)
    qkv = given.projection("qkv", normed(hidden, given.tensor("input_norm"), sizes.norm_eps))
    return given.model(qkv, "qkv")


def post_graph(sizes: BlockSizes, form: BlockForm, tensors: Mapping[str, Tensor]) -> ov.Model:
    """`attended` [1, rows, H·D] and `residual` [1, rows, E] → `hidden` [1, rows, E]: output projection, MLP, both residuals."""
    given = Given(form, tensors)
    attended = given.activations("attended", sizes.rows, sizes.attended)
    residual = given.activations("residual", sizes.rows, sizes.hidden)
    x = op.add(residual, given.projection("out", attended))
    hidden = normed(x, given.tensor("mlp_norm"), sizes.norm_eps)
    gate = given.projection("gate", hidden)
    active = op.relu(gate) if sizes.activation == "relu" else op.swish(gate)
    out = given.projection("down", op.multiply(active, given.projection("up", hidden)))
    return given.model(op.add(x, out), "hidden")


class Given:
    """The inputs of a graph that is being built; its weights are constants, or inputs too."""

    def __init__(self, form: BlockForm, tensors: Mapping[str, Tensor]):
        self._form, self._tensors = form, tensors
        self.parameters: list = []

    def activations(self, name: str, rows: int, channels: int):
        return self.input(name, [1, rows, channels], _F32)

    def tensor(self, name: str):
        value = self._tensors[name]
        if self._form.weights == "constants":
            return op.constant(value.numpy())
        return self.input(name, list(value.shape), _TYPES[str(value.dtype)])

    def projection(self, name: str, x):
        """x @ weightᵀ, and the bias where there is one."""
        weight = self.tensor(f"{name}.weight")
        if f"{name}.step" in self._tensors:
            # What makes a plugin multiply in INT8 is the FakeQuantize on both sides. The weights' scales come behind the
            # product: in front of it they would keep the product in floats.
            x = quantised(op.multiply(x, self.tensor(f"{name}.step")), 1.0)
            product = op.matmul(x, quantised(op.convert(weight, _F32), 1.0), transpose_a=False, transpose_b=True)
            product = op.multiply(product, self.tensor(f"{name}.scale"))
        else:
            product = op.matmul(x, weight, transpose_a=False, transpose_b=True)
        bias = f"{name}.bias"
        return op.add(product, self.tensor(bias)) if bias in self._tensors else product

    def model(self, output, name: str) -> ov.Model:
        output.output(0).set_names({name})
        return ov.Model([op.result(output)], self.parameters, name)

    def input(self, name: str, shape: list[int], dtype: ov.Type):
        parameter = op.parameter(shape, dtype, name)
        parameter.output(0).set_names({name})
        self.parameters.append(parameter)
        return parameter


def normed(x, weight, eps: float):
    """RMS norm over the channels."""
    mean = op.reduce_mean(op.multiply(x, x), op.constant(np.int64([-1])), keep_dims=True)
    return op.multiply(op.divide(x, op.sqrt(op.add(mean, op.constant(np.float32(eps))))), weight)
