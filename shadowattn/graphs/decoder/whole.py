"""A decoder of transformers as one graph of OpenVINO, which keys and values of earlier tokens come into and go out of."""

import warnings

import openvino as ov
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from shadowattn.models.decoder import check_family
from shadowattn.models.shape import model_shape

INPUTS = ("input_ids", "mask", "position_ids")
LOGITS = "logits"


def cache_names(layers: int) -> dict[str, str]:
    """What the keys and values of earlier tokens are called as inputs, and, with those of the new ones, as outputs."""
    places = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    return {f"past.{place}": f"present.{place}" for place in places}


def whole_graph(model: PreTrainedModel) -> ov.Model:
    """A whole decoder, weights as constants of their own names (`model.layers.0.self_attn.q_proj.weight`).

    Inputs: `input_ids` and `position_ids` int64 [B, T]; `mask` float32 [B, 1, T, P + T], which is added to the products of Q and
    K; of every layer L `past.L.key` and `past.L.value` [B, G, P, D] of earlier tokens. Outputs: `logits` [B, T, V];
    `present.L.key` and `present.L.value` [B, G, P + T, D]. Raises `InputError` on a family that the engine does not know.
    """
    check_family(model)
    shape = model_shape(model)
    names = cache_names(shape.layers)
    past = [torch.zeros(1, shape.kv_heads, 3, shape.head_dim, dtype=model.dtype) for _ in names]
    example = (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 1, 2, 5), torch.arange(3, 5)[None], *past)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the tracer's, of shapes that the mask's and the positions' own values decide
        graph = ov.convert_model(_Whole(model), example_input=example)
    for port, name in zip(graph.inputs, (*INPUTS, *names), strict=True):
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
        return (out.logits, *present)


def _filled(k: Tensor, v: Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.lazy_initialization(k, v)
    layer.keys, layer.values = k, v
    return layer
