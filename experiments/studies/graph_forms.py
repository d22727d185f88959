"""One launch of the estimate in every form, against torch. Times are of the product alone.

All query heads of a model; inputs lie where each form wants them, outputs are bound. Ratios are to torch's float32 product into
memory that it has already.
"""

import openvino as ov
import torch
from openvino import opset13 as op

from experiments.studies.graph_banks import SHAPES
from shadowattn.graphs import GraphForm, GraphShape
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import cpu_hints
from shadowattn.graphs.estimation import estimation_graph
from shadowattn.graphs.graph import Arena, Graph
from shadowattn.graphs.nncf_graph import compile_int8, nncf_graph
from shadowattn.interleave import Timing, interleave
from shadowattn.types import Requant

BASELINE = "torch float32"
# Of normal values, whose largest magnitude over a head is near four. A launch takes the same time with any scale: constants.
_SCALE = 4.2 / 127
_REQUANT = Requant("target_requant", 3e-3)
_FORMS = {
    "static scales": GraphForm(),
    "runtime scales": GraphForm("runtime"),
    "int8 inputs": GraphForm("unit"),
    "static, INT8 scores": GraphForm(requant=_REQUANT),
    "int8 inputs and scores": GraphForm("unit", _REQUANT),
    "static, mask": GraphForm(mask=True),
    "static, mask, pool 1×16": GraphForm(mask=True, pool=(1, 16)),
    "static, mask, pool 32×32": GraphForm(mask=True, pool=(32, 32)),
    "static, mask, pool 1×16, TopK 20 %": GraphForm(mask=True, pool=(1, 16), indices=True),
    "static, mask, pool 32×32, TopK 20 %": GraphForm(mask=True, pool=(32, 32), indices=True),
}


def measure_forms(model: str, *, rows: int, keys: int, rounds: int) -> dict[str, Timing]:
    """Every form, NNCF's graph, an unfolded one and torch, interleaved."""
    heads, kv_heads, dim = SHAPES[model]
    group = heads // kv_heads
    shape = GraphShape(heads, rows, dim, keys, group)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, rows, dim, generator=generator)
    k = torch.randn(kv_heads, keys, dim, generator=generator)
    calls = {BASELINE: _torch_float(q.view(kv_heads, -1, dim), k), "torch int8": _torch_int8(q.view(kv_heads, -1, dim), k)}
    calls["OpenVINO float32"] = _bound(_float_graph(shape), shape, q, k)
    for name, form in _FORMS.items():
        top_k = -(-keys // form.pool[1] // 5) if form.indices else 0
        calls[name] = _graph(GraphShape(heads, rows, dim, keys, group, top_k), form, q, k)
    if group > 1:
        calls["static, K copied per head"] = _graph(
            GraphShape(heads, rows, dim, keys), GraphForm(), q, k.repeat_interleave(group, 0)
        )
    samples = [(q.view(1, kv_heads, -1, dim).numpy(), k[None].numpy())]
    calls["NNCF"] = _bound(compile_int8(nncf_graph(shape, samples), what="nncf"), shape, q, k)
    return interleave(calls, rounds=rounds, warmup=2)


def _graph(shape: GraphShape, form: GraphForm, q: torch.Tensor, k: torch.Tensor):
    model = estimation_graph(shape, form, _SCALE, _SCALE)
    graph = Graph(compile_int8(model, what=str(form)), shape, form, (_SCALE, _SCALE), Arena([model]))
    scales = {"q_scales": torch.full((len(q),), _SCALE), "k_scales": torch.full((len(k),), _SCALE)}
    graph.run(q, k, **scales, first_position=shape.keys - shape.rows)
    return graph.infer


def _bound(model: ov.CompiledModel, shape: GraphShape, q: torch.Tensor, k: torch.Tensor):
    """A graph of the plain form, by whomever it was quantised, or not."""
    graph = Graph(model, shape, GraphForm(), (None, None), Arena([model]))
    graph.run(q, k)
    return graph.infer


def _float_graph(shape: GraphShape) -> ov.CompiledModel:
    q = op.parameter([1, shape.kv_heads, shape.group * shape.rows, shape.head_dim], ov.Type.f32)
    k = op.parameter([1, shape.kv_heads, shape.keys, shape.head_dim], ov.Type.f32)
    model = ov.Model([op.result(op.matmul(q, k, transpose_a=False, transpose_b=True))], [q, k], "float32")
    for port, name in zip((*model.inputs, *model.outputs), ("q", "k", "scores"), strict=True):
        port.get_tensor().set_names({name})
    return core().compile_model(model, "CPU", cpu_hints())


def _torch_float(q: torch.Tensor, k: torch.Tensor):
    out = torch.empty(len(k), q.shape[1], k.shape[1])
    return lambda: torch.matmul(q, k.mT, out=out)


def _torch_int8(q: torch.Tensor, k: torch.Tensor):
    """torch's INT8 product, one key head after the other: it has no batches."""
    q8, k8 = ((x / _SCALE).round().clamp(-127, 127).to(torch.int8) for x in (q, k))
    out = torch.empty(len(k), q.shape[1], k.shape[1], dtype=torch.int32)
    return lambda: [torch._int_mm(q8[g], k8[g].T, out=out[g]) for g in range(len(k8))]
