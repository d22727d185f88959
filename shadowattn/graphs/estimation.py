"""One bucket, one static OpenVINO model: Q·Kᵀ in INT8.

No mask, no 1/√D, no softmax: neither changes the order of one row's scores (section 2.2).

Two forms, both run as one INT8 matrix product by the CPU plugin. What makes that happen is the FakeQuantize on *both*
inputs; without one the plugin computes in float32 and says nothing (`runs_in_int8` looks).
"""

import numpy as np
import openvino as ov
from openvino import opset13 as op

from shadowattn.graphs.buckets import GraphShape

# Symmetric: −127 … 127, as the authors clip. 255 levels make FakeQuantize's zero exact.
INT8_MAX = 127
_LEVELS = 2 * INT8_MAX + 1


def scaled_graph(shape: GraphShape, q_scale: float, k_scale: float) -> ov.Model:
    """Float inputs with static scales: the form an NPU takes.

    Inputs q float32 [1, heads, rows, D] and k float32 [1, heads, keys, D]; output float32 [1, heads, rows, keys], the integer
    product times q_scale · k_scale. Values beyond ±127 steps are clipped.
    """
    q, k = _parameters(shape, ov.Type.f32)
    return _model(_quantize(q, q_scale), _quantize(k, k_scale), [q, k])


def unit_graph(shape: GraphShape) -> ov.Model:
    """Inputs that are already int8, on the grid of the integers: one graph for any scale.

    Inputs int8 [1, heads, rows, D] and [1, heads, keys, D]; output float32 [1, heads, rows, keys], the integer product.
    """
    q, k = _parameters(shape, ov.Type.i8)
    return _model(_quantize(op.convert(q, ov.Type.f32), 1.0), _quantize(op.convert(k, ov.Type.f32), 1.0), [q, k])


def runs_in_int8(compiled: ov.CompiledModel) -> bool:
    """Whether the compiled product really is an INT8 primitive, read from the runtime model.

    Meaningful for OpenVINO's CPU plugin, which names its primitives; others leave the name out, and the answer is False.
    """
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        if "layerType" in info and info["layerType"].astype(str) == "MatMul":
            types = {value.get_element_type().get_type_name() for value in node.inputs()}
            return info["primitiveType"].astype(str).lower().endswith("_i8") and types <= {"i8", "u8"}
    return False


def _parameters(shape: GraphShape, dtype: ov.Type) -> list:
    return [op.parameter([1, shape.heads, length, shape.head_dim], dtype) for length in (shape.rows, shape.keys)]


def _quantize(x, scale: float):
    low, high = (op.constant(np.float32([sign * INT8_MAX * scale])) for sign in (-1, 1))
    return op.fake_quantize(x, low, high, low, high, _LEVELS)


def _model(q, k, parameters: list) -> ov.Model:
    scores = op.matmul(q, k, transpose_a=False, transpose_b=True)
    model = ov.Model([op.result(scores)], parameters, "estimate")
    # OpenVINO numbers nodes per process; fixed names keep a saved graph byte-identical and its compile cache warm.
    for index, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(f"n{index}")
    return model
