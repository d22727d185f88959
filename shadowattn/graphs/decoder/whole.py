"""A decoder of transformers as one graph of OpenVINO; earlier keys and values are inputs and outputs, or a state."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from shadowattn.errors import InputError
from shadowattn.graphs.decoder.passes import MakeStateful, rewritten
from shadowattn.models.decoder import check_family
from shadowattn.models.shape import ModelShape, model_shape

INPUTS = ("input_ids", "mask", "position_ids")
LLM_INPUTS = ("input_ids", "attention_mask", "position_ids")
BEAM = "beam_idx"
LOGITS = "logits"


def cache_names(layers: int) -> dict[str, str]:
    """What the keys and values of earlier tokens are called as inputs, and, with those of the new ones, as outputs."""
    places = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    return {f"past.{place}": f"present.{place}" for place in places}


def whole_graph(model: PreTrainedModel) -> ov.Model:
    """A whole decoder, weights as constants of their own names (`model.layers.0.self_attn.q_proj.weight`).

    Inputs: `input_ids` and `position_ids` int64 [B, T]; `mask` float32 [B, 1, T, P + T], which is added to the products of Q and
    K; of every layer L `past.L.key` and `past.L.value` [B, G, P, D] of earlier tokens. Outputs: `logits` float32 [B, T, V];
    `present.L.key` and `present.L.value` [B, G, P + T, D]. Raises `InputError` on a family that the engine does not know.
    """
    check_family(model)
    shape = model_shape(model)
    return _converted(model, INPUTS, torch.zeros(1, 1, 2, 5), cache_names(shape.layers), shape)


def llm_graph(model: PreTrainedModel, *, eager: bool = False) -> ov.Model:
    """A whole decoder in the form in which openvino-genai and NPUW's LLM mode take one: earlier keys and values are its state.

    Inputs: `input_ids` and `position_ids` int64 [B, T]; `attention_mask` int64 [B, P + T], 1 where a token is; `beam_idx` int32
    [B], which sequence each one goes on from. Output: `logits` float32 [B, T, V]. Attention is one operation, for which
    openvino-genai looks. `eager` converts it from products and a softmax, whose masked scores are finite: NPUW fills a chunk up
    with tokens that may look at nothing, of which the other form makes NaN. Raises `InputError` on a family that the engine does
    not know, and on an eager form of weights in another dtype than float32, on whose state OpenVINO's CPU plugin fails where the
    processor has no products in bfloat16.
    """
    check_family(model)
    if eager and model.dtype != torch.float32:
        raise InputError(f"model: the eager form takes weights in float32, got {model.dtype}; convert them by model.float()")
    shape = model_shape(model)
    # NPUW knows the state by these names.
    names = {f"past_key_values.{name.removeprefix('past.')}": present for name, present in cache_names(shape.layers).items()}
    with _attention(model, "eager" if eager else "sdpa"):
        graph = _converted(model, LLM_INPUTS, torch.ones(1, 5, dtype=torch.int64), names, shape)
    _choose_sequences(graph, names)
    rewritten(graph, MakeStateful(graph, names))
    _begin_with_batch(graph, shape)
    return graph


def _converted(
    model: PreTrainedModel, inputs: Sequence[str], mask: Tensor, names: Mapping[str, str], shape: ModelShape
) -> ov.Model:
    """The graph by the example of two tokens behind three, with a `mask` for them; `names` as `cache_names` has them."""
    past = [torch.zeros(1, shape.kv_heads, 3, shape.head_dim, dtype=model.dtype) for _ in names]
    example = (torch.zeros(1, 2, dtype=torch.int64), mask, torch.arange(3, 5)[None], *past)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the tracer's, of shapes that the mask's and the positions' own values decide
        graph = ov.convert_model(_Whole(model), example_input=example)
    for port, name in zip(graph.inputs, (*inputs, *names), strict=True):
        port.set_names({name})
    for port, name in zip(graph.outputs, (LOGITS, *names.values()), strict=True):
        port.set_names({name})
    for name in names:
        cached = graph.input(name).get_node()
        cached.set_partial_shape(ov.PartialShape([-1, shape.kv_heads, -1, shape.head_dim]))
    graph.validate_nodes_and_infer_types()
    for node in graph.get_ops():
        if node.get_type_name() == "Constant":
            node.set_friendly_name(node.get_friendly_name().removeprefix("self.whole."))
    return graph


def _choose_sequences(graph: ov.Model, names: Collection[str]) -> None:
    """Lets an input say which sequence's keys and values each sequence goes on from."""
    beam = op.parameter([-1], np.int32, name=BEAM)
    beam.output(0).set_names({BEAM})
    for name in names:
        cached = graph.input(name).get_node()
        readers = list(cached.output(0).get_target_inputs())
        chosen = op.gather(cached, beam, op.constant(0))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    graph.add_parameters([beam])
    graph.validate_nodes_and_infer_types()


def _begin_with_batch(graph: ov.Model, shape: ModelShape) -> None:
    """Makes a state that is not set yet hold no tokens of as many sequences as there are at the call."""
    ids = graph.input(LLM_INPUTS[0]).get_node()
    batch = op.gather(op.shape_of(ids, output_type="i64"), op.constant([0]), op.constant(0))
    empty = op.concat([batch, op.constant(np.array([shape.kv_heads, 0, shape.head_dim]))], 0)
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            zero = op.convert(op.constant(np.float32(0)), node.get_element_type().get_type_name())
            node.set_arguments([op.broadcast(zero, empty)])
    graph.validate_nodes_and_infer_types()


@contextmanager
def _attention(model: PreTrainedModel, form: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(form)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _Whole(nn.Module):
    """The model with a cache that is made of its arguments and given back."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.whole = model

    def forward(self, input_ids: Tensor, mask: Tensor, position_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = DynamicCache()
        cache.layers = [_filled(k, v) for k, v in zip(past[::2], past[1::2], strict=True)]
        out = self.whole(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        present = [part for layer in out.past_key_values.layers for part in (layer.keys, layer.values)]
        return (out.logits.float(), *present)


def _filled(k: Tensor, v: Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.lazy_initialization(k, v)
    layer.keys, layer.values = k, v
    return layer
