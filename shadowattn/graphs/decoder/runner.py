"""All layers' blocks of one height, compiled, with their tensors bound."""

import logging
from collections.abc import Collection, Sequence
from contextlib import redirect_stdout
from io import StringIO

import openvino as ov
import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import multiplies_exactly
from shadowattn.graphs.decoder.blocks import BlockSizes, post_graph, pre_graph
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.graphs.decoder.tensors import LayerTensors

_FEW_ROWS = 8
_PRODUCTS = ("MatMul", "FullyConnected")


class Blocks:
    """Runs the layers one after the other on up to `sizes.rows` rows; between `qkv` and `finish` comes attention.

    With weights as inputs one pair of graphs serves all layers. Rows beyond those that were given hold what an earlier run left:
    they are computed, and never read. `ahead`: the layers that `qkv_ahead` will be asked for.
    """

    def __init__(
        self,
        sizes: BlockSizes,
        form: BlockForm,
        layers: Sequence[LayerTensors],
        device: str = "CPU",
        *,
        ahead: Collection[int] = (),
    ):
        self.rows = sizes.rows
        channels = layers[0].pre["qkv.weight"].shape[0]
        self._hidden = [torch.zeros(1, sizes.rows, sizes.hidden) for _ in range(2)]  # a layer reads one and writes the other
        self._qkv, self._attended = torch.zeros(1, sizes.rows, channels), torch.zeros(1, sizes.rows, sizes.attended)
        bound = {"qkv": self._qkv, "attended": self._attended}
        shared = form.weights == "inputs"
        pairs = [_compiled(sizes, form, layer, device) for layer in (layers[:1] if shared else layers)]
        self._steps: list[list[_Step]] = []
        self._early: dict[int, _Step] = {}
        self._early_qkv = torch.zeros_like(self._qkv) if ahead else None
        requests: list[list[ov.InferRequest]] = []
        for index, layer in enumerate(layers):
            before, after = self._hidden[index % 2], self._hidden[1 - index % 2]
            models = pairs[0 if shared else index]
            # A request holds the memory between inputs and outputs. That of few rows is little, and its tensors stay bound.
            once = not shared or sizes.rows <= _FEW_ROWS
            if once or not requests:
                requests.append([model.create_infer_request() for model in models])
            tensors = {**bound, "hidden": before, **layer.pre}, {**bound, "residual": before, "hidden": after, **layer.post}
            self._steps.append([_Step(*one, once) for one in zip(models, requests[-1], tensors, strict=True)])
            if index in ahead:  # the same graph, from what entered the layer before
                request = models[0].create_infer_request() if once else requests[-1][0]
                early = tensors[0] | {"hidden": after, "qkv": self._early_qkv}
                self._early[index] = _Step(models[0], request, early, once)

    def begin(self, hidden: Tensor) -> None:
        """The rows [n, E] that enter the first layer."""
        self._hidden[0][0, : len(hidden)] = hidden

    def qkv(self, layer: int) -> Tensor:
        """Q, K and V of a layer, [rows, (H + 2G)·D], before the rotary embedding; overwritten by the next layer's."""
        self._steps[layer][0].run()
        return self._qkv[0]

    def qkv_ahead(self, layer: int) -> Tensor:
        """What `qkv` of this layer gives for the rows that entered the one before; asked before that one's `finish`.

        Overwritten by the next such call.
        """
        self._early[layer].run()
        return self._early_qkv[0]

    def finish(self, layer: int, attended: Tensor) -> None:
        """The rest of the layer, for what the heads computed, [H, n, D]."""
        heads, rows, head_dim = attended.shape
        self._attended[0, :rows].view(rows, heads, head_dim).copy_(attended.transpose(0, 1))
        self._steps[layer][1].run()

    def hidden(self, rows: int) -> Tensor:
        """What leaves the last layer, [rows, E]; overwritten by the next run."""
        return self._hidden[len(self._steps) % 2][0, :rows]


class _Step:
    """One call: the request of a graph, and the tensors that it reads and writes. `once`: the request is this call's alone."""

    def __init__(self, model: ov.CompiledModel, request: ov.InferRequest, tensors: dict[str, Tensor], once: bool):
        self._request, self._once = request, once
        self._tensors = tensors  # what OpenVINO reads is torch's memory
        self._inputs = [(at, _shared(tensors[port.any_name])) for at, port in enumerate(model.inputs)]
        self._output = _shared(tensors[model.output(0).any_name])
        self._bind()

    def _bind(self) -> None:
        for at, tensor in self._inputs:
            self._request.set_input_tensor(at, tensor)
        self._request.set_output_tensor(0, self._output)

    def run(self) -> None:
        if not self._once:
            self._bind()
        self._request.infer(share_outputs=True)


def _shared(tensor: Tensor) -> ov.Tensor:
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _compiled(sizes: BlockSizes, form: BlockForm, layer: LayerTensors, device: str) -> list[ov.CompiledModel]:
    """The blocks before and behind attention. Raises `InputError` where INT8 was asked for and would run in floats, unsaid."""
    models = [pre_graph(sizes, form, layer.pre), post_graph(sizes, form, layer.post)]
    if form.precision in ("w8", "w4"):
        models = [compressed(model, form) for model in models]
    hints = {}
    if device == "CPU":
        hints["INFERENCE_PRECISION_HINT"] = "bf16" if form.precision == "bfloat16" else "f32"
        hints["INFERENCE_NUM_THREADS"] = torch.get_num_threads()
        hints["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # else activations beside compressed weights are rounded to INT8
        if form.rounds_activations and not multiplies_exactly():
            hints["LP_TRANSFORMS_MODE"] = False
    compiled = [core().compile_model(model, device, hints) for model in models]
    others = [kind for model in compiled for kind in products(model) if not kind.endswith("_bf16")]
    if device == "CPU" and form.precision == "bfloat16" and others:
        raise InputError(
            f"engine.precision: expected products in bfloat16, but on this processor OpenVINO compiled {', '.join(others)}; "
            "use engine.precision=float32"
        )
    if device == "CPU" and form.rounds_activations and multiplies_exactly():
        for model, tensors in zip(compiled, (layer.pre, layer.post), strict=True):
            expected, found = sum(name.endswith(".step") for name in tensors), products(model)
            if sum(kind.endswith("_i8") for kind in found) != expected:
                raise InputError(
                    f"engine: expected {expected} products in INT8, but the CPU plugin compiled {', '.join(found)}; use "
                    "engine.precision=float32, and report this processor"
                )
    return compiled


def products(model: ov.CompiledModel) -> list[str]:
    """The primitives, in lower case, that compute a graph's matrix products on the CPU plugin, read from the runtime model."""
    found = []
    for node in model.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        if "layerType" in info and info["layerType"].astype(str) in _PRODUCTS:
            found.append(info["primitiveType"].astype(str).lower())
    return found


def compressed(model: ov.Model, form: BlockForm) -> ov.Model:
    """The graph with its weights in the form's integers, INT8 or INT4, as NNCF compresses them."""
    import nncf  # a second to import, and only for this

    nncf.set_log_level(logging.ERROR)
    options = {"mode": nncf.CompressWeightsMode.INT8_SYM}
    if form.precision == "w4":
        options = {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": form.group, "ratio": 1.0, "all_layers": True}
    with redirect_stdout(StringIO()):  # a progress bar for each of the many graphs
        return nncf.compress_weights(model, **options)
