"""Which graphs `+exp=npu_compile` compiles: forms, bank shapes, layouts, decoder blocks, dense attention; built when asked."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import openvino as ov
import torch

from shadowattn.device_check import CASES
from shadowattn.graphs import GraphForm, GraphShape
from shadowattn.graphs.decoder.blocks import BlockSizes, post_graph, pre_graph
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.graphs.decoder.runner import compressed
from shadowattn.graphs.decoder.tensors import LayerTensors, layer_tensors
from shadowattn.graphs.estimation import estimation_graph
from shadowattn.graphs.npu.graphs import LAYOUTS, attention_graph, in_half
from shadowattn.models.decoder import LayerWeights
from shadowattn.models.known import KNOWN_MODELS, PublishedShape
from shadowattn.types import BLOCK_POINTS

MODELS = ("smollm2", "qwen2_0_5b", "qwen2_1_5b", "phonelm_0_5b", "phonelm_1_5b")
# Forms of bank graphs, by name; the last one selects a fifth of the keys.
BANK_FORMS = {
    "static": GraphForm(),
    "int8": GraphForm("int8"),
    "int8, mask, TopK 20 %": GraphForm("int8", mask=True, indices=True),
}
_INT8 = GraphForm("int8")
# Blocks by name. Weights as inputs are what the engine does by default.
BLOCK_FORMS = {
    "float16": BlockForm("float32", "constants"),
    "w8a8": BlockForm("w8a8", "constants"),
    "w8a8, weights as inputs": BlockForm("w8a8", "inputs"),
    "w8": BlockForm("w8", "constants"),
    "w4": BlockForm("w4", "constants"),
}
_SCALE = 4.2 / 127
_RANGE = 3.0  # of activations that blocks quantise: a constant, which decides no time
_LAYOUT = GraphShape(4, 128, 64, 1024)


@dataclass(frozen=True)
class GraphCase:
    """One graph: how it is built, and what rows say of it. `macs`: multiply-accumulates of its products, by its shapes."""

    part: str
    model: str
    name: str
    shape: GraphShape
    macs: float
    build: Callable[[], ov.Model]
    tiles: int = 0


def cases(
    *,
    rows: int,
    keys: Sequence[int],
    launch_heads: Sequence[int],
    models: Sequence[str],
    whole: Sequence[str],
    attention_keys: Sequence[int],
) -> Iterator[GraphCase]:
    """All, for chunks of `rows` rows: banks of `models` on `keys` keys; blocks of `whole`, and attention on `attention_keys`."""
    yield from _forms()
    yield from _layouts()
    for model in whole:
        yield from _blocks(model, rows)
        yield from _attention(model, rows, attention_keys)
    for model in models:
        yield from _bank(model, rows, keys, launch_heads)


def bank_shapes(model: str, *, rows: int, keys: Sequence[int], launch_heads: Sequence[int]) -> list[GraphShape]:
    """Launches of each number of heads, folded where heads share a key head, and of all heads of a layer at once."""
    known = KNOWN_MODELS[model].shape
    group = known.heads // known.kv_heads
    most = group if group > 1 else known.heads
    sizes = {(min(count, most), min(count, most) if group > 1 else 1) for count in launch_heads} | {(known.heads, group)}
    return [GraphShape(heads, rows, known.head_dim, count, fold) for heads, fold in sorted(sizes) for count in keys]


def _estimate(part: str, model: str, name: str, shape: GraphShape, form: GraphForm, tiles: int = 0) -> GraphCase:
    build = partial(estimation_graph, shape, form, _SCALE, _SCALE)
    return GraphCase(part, model, name, shape, _macs(shape), build, tiles)


def _forms() -> Iterator[GraphCase]:
    for name, (shape, form) in CASES.items():
        yield _estimate("form", "none", name, shape, form)


def _layouts() -> Iterator[GraphCase]:
    for name, build in LAYOUTS.items():
        yield GraphCase("layout", "none", name, _LAYOUT, _macs(_LAYOUT), partial(build, _LAYOUT))
    for name, int8 in (("dense attention, float16", False), ("dense attention, int8 in", True)):
        yield GraphCase("layout", "none", name, _LAYOUT, 2 * _macs(_LAYOUT), partial(attention_graph, _LAYOUT, int8=int8))
    for rows in (32, 64, 256, 512, 1024):
        yield _estimate("rows", "none", "int8", replace(_LAYOUT, rows=rows), _INT8)
    for keys in (256, 512, 2048, 4096, 8192):
        yield _estimate("keys", "none", "int8", replace(_LAYOUT, keys=keys), _INT8)
    for heads in (1, 2, 8, 16):
        yield _estimate("heads", "none", "int8", replace(_LAYOUT, heads=heads), _INT8)
    for heads in (2, 4, 8):
        yield _estimate("heads folded", "none", "int8", replace(_LAYOUT, heads=heads, group=heads), _INT8)
    for dim in (96, 128, 160):
        yield _estimate("head dimension", "none", "int8", replace(_LAYOUT, head_dim=dim), _INT8)
    for rows in (128, 512):
        for tiles in (1, 2, 3, 4, 6):
            yield _estimate("tiles", "none", "int8", replace(_LAYOUT, rows=rows, keys=4096), _INT8, tiles)


def _bank(model: str, rows: int, keys: Sequence[int], launch_heads: Sequence[int]) -> Iterator[GraphCase]:
    for shape in bank_shapes(model, rows=rows, keys=keys, launch_heads=launch_heads):
        for name, form in BANK_FORMS.items():
            yield _estimate("bank", model, name, replace(shape, top_k=-(-shape.keys // 5) if form.indices else 0), form)


def _attention(model: str, rows: int, keys: Sequence[int]) -> Iterator[GraphCase]:
    known = KNOWN_MODELS[model].shape
    for count in keys:
        shape = GraphShape(known.heads, rows, known.head_dim, count, known.heads // known.kv_heads)
        yield GraphCase("attention", model, "float16", shape, 2 * _macs(shape), partial(attention_graph, shape, int8=False))


def _blocks(model: str, rows: int) -> Iterator[GraphCase]:
    """Before and behind attention, of one layer with random weights, float16 at the borders."""
    known = KNOWN_MODELS[model].shape
    attended, channels = known.heads * known.head_dim, (known.heads + 2 * known.kv_heads) * known.head_dim
    macs = {
        "before": rows * known.hidden * channels,
        "behind": rows * known.hidden * (attended + 3 * known.intermediate),
    }
    for name, form in BLOCK_FORMS.items():
        for place, count in macs.items():
            shape = GraphShape(known.heads, rows, known.head_dim, 1)  # no keys take part
            yield GraphCase(f"block {place}", model, name, shape, count, partial(_block, known, rows, form, place))


def _block(known: PublishedShape, rows: int, form: BlockForm, place: str) -> ov.Model:
    attended = known.heads * known.head_dim
    sizes = BlockSizes(rows, known.hidden, attended, known.activation, known.norm_eps)
    tensors = _tensors(known, form)
    model = pre_graph(sizes, form, tensors.pre) if place == "before" else post_graph(sizes, form, tensors.post)
    if form.precision in ("w8", "w4"):
        model = compressed(model, form)
    return in_half(model, ("hidden", "attended", "residual"))


def _tensors(known: PublishedShape, form: BlockForm) -> LayerTensors:
    generator = torch.Generator().manual_seed(0)
    attended, channels = known.heads * known.head_dim, (known.heads + 2 * known.kv_heads) * known.head_dim

    def weight(*size: int) -> torch.Tensor:
        return 0.02 * torch.randn(*size, generator=generator)

    hidden, inner = known.hidden, known.intermediate
    biased = "Qwen2" in known.config.__name__
    layer = LayerWeights(
        torch.ones(hidden), weight(channels, hidden), weight(channels) if biased else None, None, None, weight(hidden, attended),
        torch.ones(hidden), weight(inner, hidden), weight(inner, hidden), weight(hidden, inner),
    )  # fmt: skip
    widths = dict(zip(BLOCK_POINTS, (hidden, attended, hidden, inner), strict=True))
    return layer_tensors(layer, form, {point: torch.full((width,), _RANGE) for point, width in widths.items()})


def _macs(shape: GraphShape) -> float:
    return float(shape.heads * shape.rows * shape.keys * shape.head_dim)
