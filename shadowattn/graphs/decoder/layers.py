"""A decoder's layers with dense attention as static graphs: all in one, one for each, one for all, or the body of a loop.

What `+exp=study_ir_reuse` compares. Inputs of every form: `hidden` [1, R, E]; `mask` [1, 1, 1, R, P + R], added to the products
of Q and K; `cos` and `sin` [1, R, 1, D], the first half of `sin` negative; keys and values of P earlier tokens. R rows; H query
and G key/value heads of D; E hidden. Outputs: `OUT`, the next `hidden`, and of every layer the R new keys and values
[1, G, R, D].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from openvino.op import tensor_iterator
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.decoder.blocks import BlockSizes, Given, normed
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.graphs.decoder.tensors import layer_tensors
from shadowattn.models.decoder import Decoder

OUT = "hidden_out"  # not the input's name: OpenVINO renames one of the two in a graph that comes from its cache
_F32 = ov.Type.f32
_CONSTANTS, _INPUTS = BlockForm(weights="constants"), BlockForm(weights="inputs")


@dataclass(frozen=True)
class StepSizes:
    """A step of `rows` tokens behind `past` earlier ones, of a decoder's layers."""

    blocks: BlockSizes
    kv_heads: int
    head_dim: int
    past: int

    @classmethod
    def of(cls, decoder: Decoder, *, rows: int, past: int) -> "StepSizes":
        """Raises `InputError` on a decoder that norms Q and K: these graphs have no such norm."""
        if decoder.layers[0].q_norm is not None:
            raise InputError(
                "layers: expected a decoder without norms of Q and K (Llama, Qwen2), got one with them; use another shape"
            )
        shape = decoder.shape
        attended = shape.heads * shape.head_dim
        blocks = BlockSizes(rows, decoder.hidden, attended, decoder.activation, decoder.norm_eps)
        return cls(blocks, shape.kv_heads, shape.head_dim, past)

    @property
    def cached(self) -> list[int]:
        """The shape of a layer's earlier keys, or values."""
        return [1, self.kv_heads, self.past, self.head_dim]


def step_tensors(decoder: Decoder) -> list[dict[str, Tensor]]:
    """Every layer's weights, by the names that the graphs know them by."""
    return [(pair := layer_tensors(layer, _INPUTS, {})).pre | pair.post for layer in decoder.layers]


def one_graph(sizes: StepSizes, layers: Sequence[Mapping[str, Tensor]]) -> ov.Model:
    """These layers in one graph, weights as constants; `past.L.key` and `past.L.value`, `present.L.key` and `present.L.value`."""
    common, x, made = _Common(sizes), None, []
    x = common.hidden
    for index, tensors in enumerate(layers):
        given = Given(_CONSTANTS, tensors)
        key, value = (given.input(f"past.{index}.{kind}", sizes.cached, _F32) for kind in ("key", "value"))
        x, *present = _layer(given, sizes, common, x, key, value)
        common.parameters += given.parameters
        made += [_named(part, f"present.{index}.{kind}") for part, kind in zip(present, ("key", "value"), strict=True)]
    return _model([_named(x, OUT), *made], common.parameters)


def shared_graph(sizes: StepSizes, tensors: Mapping[str, Tensor]) -> ov.Model:
    """One layer whose weights are inputs too, by name: compiled once, it serves every layer of these sizes."""
    common, given = _Common(sizes), Given(_INPUTS, tensors)
    key, value = (given.input(f"past.{kind}", sizes.cached, _F32) for kind in ("key", "value"))
    x, *present = _layer(given, sizes, common, common.hidden, key, value)
    made = [_named(part, f"present.{kind}") for part, kind in zip(present, ("key", "value"), strict=True)]
    return _model([_named(x, OUT), *made], common.parameters + given.parameters)


def loop_graph(sizes: StepSizes, layers: Sequence[Mapping[str, Tensor]]) -> ov.Model:
    """The layer as the body of a TensorIterator over stacked weights and stacked `past.key` and `past.value` [L, G, P, D]."""
    layers = [{name: x if x.dim() == 3 else x[None] for name, x in tensors.items()} for tensors in layers]
    inner, given = _Common(sizes), Given(_INPUTS, layers[0])
    cached = [given.input(f"past.{kind}", sizes.cached, _F32) for kind in ("key", "value")]
    x, *present = _layer(given, sizes, inner, inner.hidden, *cached)
    body_results = [op.result(x), *map(op.result, present)]
    body = ov.Model(body_results, inner.parameters + given.parameters, "body")
    outer = _Common(sizes)
    past = {name: _input(name, [len(layers), *sizes.cached[1:]]) for name in ("past.key", "past.value")}
    loop = tensor_iterator()
    loop.set_body(body)
    loop.set_merged_input(inner.hidden, outer.hidden.output(0), body_results[0].output(0))
    for here, there in zip((inner.mask, inner.cos, inner.sin), (outer.mask, outer.cos, outer.sin), strict=True):
        loop.set_invariant_input(here, there.output(0))
    for parameter in given.parameters:
        name = parameter.output(0).get_any_name()
        of = past[name] if name in past else op.constant(torch.cat([tensors[name] for tensors in layers]).numpy())
        loop.set_sliced_input(parameter, of.output(0), 0, 1, 1, -1, 0)
    out = loop.get_iter_value(body_results[0].output(0), -1)
    made = [loop.get_concatenated_slices(result.output(0), 0, 1, 1, -1, 0) for result in body_results[1:]]
    results = [
        _named(out, OUT),
        *(_named(part, f"present.{kind}") for part, kind in zip(made, ("key", "value"), strict=True)),
    ]
    return ov.Model(results, [*outer.parameters, *past.values()], "loop")


class _Common:
    """The inputs that all layers read."""

    def __init__(self, sizes: StepSizes):
        rows, dim = sizes.blocks.rows, sizes.head_dim
        self.hidden = _input("hidden", [1, rows, sizes.blocks.hidden])
        self.mask = _input("mask", [1, 1, 1, rows, sizes.past + rows])
        self.cos, self.sin = (_input(name, [1, rows, 1, dim]) for name in ("cos", "sin"))
        self.parameters = [self.hidden, self.mask, self.cos, self.sin]


def _layer(given: Given, sizes: StepSizes, common: _Common, x, key, value):
    """What leaves the layer, and its new keys and values."""
    blocks, rows, dim = sizes.blocks, sizes.blocks.rows, sizes.head_dim
    heads, groups = blocks.attended // dim, sizes.kv_heads
    qkv = given.projection("qkv", normed(x, given.tensor("input_norm"), blocks.norm_eps))
    by_head = op.reshape(qkv, op.constant(np.int64([1, rows, heads + 2 * groups, dim])), False)
    parts = op.variadic_split(by_head, op.constant(np.int64(2)), op.constant(np.int64([heads, groups, groups])))
    q, k = (_rotated(parts.output(i), common, dim) for i in (0, 1))
    order = op.constant(np.int64([0, 2, 1, 3]))
    q, k, v = (op.transpose(one, order) for one in (q, k, parts.output(2)))
    keys, values = op.concat([key, k], 2), op.concat([value, v], 2)
    grouped = op.reshape(q, op.constant(np.int64([1, groups, heads // groups, rows, dim])), False)
    keys, values = (op.unsqueeze(one, op.constant(np.int64([2]))) for one in (keys, values))
    scores = op.multiply(op.matmul(grouped, keys, False, True), op.constant(np.float32(dim**-0.5)))
    attended = op.matmul(op.softmax(op.add(scores, common.mask), -1), values, False, False)
    attended = op.transpose(op.reshape(attended, op.constant(np.int64([1, heads, rows, dim])), False), order)
    attended = op.reshape(attended, op.constant(np.int64([1, rows, blocks.attended])), False)
    x = op.add(x, given.projection("out", attended))
    hidden = normed(x, given.tensor("mlp_norm"), blocks.norm_eps)
    gate = given.projection("gate", hidden)
    active = op.relu(gate) if blocks.activation == "relu" else op.swish(gate)
    return op.add(x, given.projection("down", op.multiply(active, given.projection("up", hidden)))), k, v


def _rotated(x, common: _Common, dim: int):
    """The rotary embedding of x [1, R, heads, D]; the halves of a head are pairs."""
    halves = op.split(x, op.constant(np.int64(3)), 2)
    turned = op.concat([halves.output(1), halves.output(0)], 3)
    return op.add(op.multiply(x, common.cos), op.multiply(turned, common.sin))


def _input(name: str, shape: list[int]):
    parameter = op.parameter(shape, _F32, name)
    parameter.output(0).set_names({name})
    return parameter


def _named(output, name: str):
    """A result, by name."""
    output = output.output(0) if isinstance(output, ov.Node) else output
    result = op.result(output)
    result.output(0).set_names({name})
    return result


def _model(results: list, parameters: list) -> ov.Model:
    return fixed_names(ov.Model(results, parameters, "layers"))


def fixed_names(model: ov.Model) -> ov.Model:
    """The model with nodes named by their order, so that a cache, or a plan by names, knows it again when it is built anew."""
    for number, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(f"{node.get_type_name()}_{number}")
    return model
