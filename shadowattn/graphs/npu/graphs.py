"""Graphs that are compiled for an NPU to learn what its cost model rewards; nothing of the library runs them.

Integers of 8 bits come in as −1 … 1, and float16 scores go out, as in the form `int8`; what differs is in the name.
"""

from collections.abc import Callable, Collection

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.preprocess import PrePostProcessor

from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.estimation import named_input, quantised

_F16, _F32, _I8 = ov.Type.f16, ov.Type.f32, ov.Type.i8
_SCALE = 0.033  # of float inputs that the graph quantises; a constant, which decides no time


def in_half(model: ov.Model, names: Collection[str]) -> ov.Model:
    """The graph with float16 in place of float32 at its inputs of these names and its output, in place."""
    steps = PrePostProcessor(model)
    for port in model.inputs:
        if port.any_name in names:
            steps.input(port.any_name).tensor().set_element_type(_F16)
    steps.output(0).tensor().set_element_type(_F16)
    return steps.build()


def attention_graph(shape: GraphShape, *, int8: bool) -> ov.Model:
    """Dense attention of a chunk on the device: both products, an additive mask [1, 1, M, keys] and softmax between; float16 out.

    `int8`: Q, K and V come in as integers. Their products are then INT8 where the compiler can, the probabilities are not.
    """
    batch, rows = shape.kv_heads, shape.group * shape.rows
    sizes = {"q": rows, "k": shape.keys, "v": shape.keys}
    q, k, v = inputs = [
        named_input(name, [1, batch, size, shape.head_dim], _I8 if int8 else _F16) for name, size in sizes.items()
    ]
    mask = named_input("mask", [1, 1, rows, shape.keys], _F16)
    q, k, v = (_unit(x) if int8 else op.convert(x, _F32) for x in (q, k, v))
    scores = op.multiply(op.matmul(q, k, False, True), op.constant(np.float32(shape.head_dim**-0.5)))
    probabilities = op.softmax(op.add(scores, op.convert(mask, _F32)), -1)
    return _model(op.matmul(probabilities, v, False, False), [*inputs, mask])


def _plain(shape: GraphShape) -> ov.Model:
    q, k = _qk(shape, _I8)
    return _model(op.matmul(_unit(q), _unit(k), False, True), [q, k])


def _transposed_keys(shape: GraphShape) -> ov.Model:
    q, _ = _qk(shape, _I8)
    k = named_input("k", [1, shape.kv_heads, shape.head_dim, shape.keys], _I8)
    return _model(op.matmul(_unit(q), _unit(k), False, False), [q, k])


def _keys_by_rows(shape: GraphShape) -> ov.Model:
    q, k = _qk(shape, _I8)
    return _model(op.matmul(_unit(k), _unit(q), False, True), [q, k])


def _heads_inside(shape: GraphShape) -> ov.Model:
    rows = shape.group * shape.rows
    q, k = (named_input(n, [1, count, shape.kv_heads, shape.head_dim], _I8) for n, count in (("q", rows), ("k", shape.keys)))
    moved = [op.transpose(_unit(x), op.constant(np.int64([0, 2, 1, 3]))) for x in (q, k)]
    return _model(op.matmul(*moved, False, True), [q, k])


def _float16(shape: GraphShape) -> ov.Model:
    q, k = _qk(shape, _F16)
    return _model(op.matmul(op.convert(q, _F32), op.convert(k, _F32), False, True), [q, k])


def _float16_quantised(shape: GraphShape) -> ov.Model:
    q, k = _qk(shape, _F16)
    return _model(op.matmul(*(quantised(op.convert(x, _F32), _SCALE) for x in (q, k)), False, True), [q, k])


def _added_mask(shape: GraphShape) -> ov.Model:
    q, k = _qk(shape, _I8)
    mask = named_input("mask", [1, 1, shape.group * shape.rows, shape.keys], _F16)
    return _model(op.add(op.matmul(_unit(q), _unit(k), False, True), op.convert(mask, _F32)), [q, k, mask])


# Layouts and arithmetic of the product, by what they are called in rows.
LAYOUTS: dict[str, Callable[[GraphShape], ov.Model]] = {
    "int8 in, float16 out": _plain,
    "K transposed": _transposed_keys,
    "keys × rows out": _keys_by_rows,
    "heads inside rows": _heads_inside,
    "float16 in, float16 product": _float16,
    "float16 in, INT8 product": _float16_quantised,
    "mask as an input, added": _added_mask,
}


def _qk(shape: GraphShape, dtype: ov.Type) -> list:
    lengths = {"q": shape.group * shape.rows, "k": shape.keys}
    return [named_input(name, [1, shape.kv_heads, length, shape.head_dim], dtype) for name, length in lengths.items()]


def _unit(x):
    return quantised(op.convert(x, _F32), 1.0, largest=1.0)


def _model(out, inputs: list) -> ov.Model:
    model = ov.Model([op.result(op.convert(out, _F16))], inputs, "graph")
    model.output(0).set_names({"out"})  # else OpenVINO numbers it in the process
    return model
