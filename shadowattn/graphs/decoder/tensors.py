"""What the graphs of one layer are given: its weights in the arithmetic of a form, by name."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.models.decoder import LayerWeights

# Which input a projection has, by `types.BLOCK_POINTS`.
_POINT_OF = {"qkv": "qkv", "out": "out", "gate": "mlp", "up": "mlp", "down": "down"}
_LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of the block before attention (`pre`) and of the one behind it (`post`), by the names of the graphs' inputs."""

    pre: dict[str, Tensor]
    post: dict[str, Tensor]


def layer_tensors(layer: LayerWeights, form: BlockForm, ranges: dict[str, Tensor]) -> LayerTensors:
    """A layer's tensors in `form`. `ranges`: the largest magnitude of every channel of each of `types.BLOCK_POINTS`, where the
    form rounds activations: the largest of all makes the input's scale.

    Matrices are NAME.weight [out, in]; in INT8 also NAME.scale [1, 1, out], what a product of integers is worth, and NAME.step
    [1, 1, 1], 1 / the input's scale.
    """

    def projection(name: str) -> dict[str, Tensor]:
        weight = getattr(layer, name).float().contiguous()
        if not form.rounds_activations or _POINT_OF[name] in form.floats:
            return {f"{name}.weight": weight}
        rows = weight.abs().amax(1).clamp(min=_LEAST) / INT8_MAX
        scale = max(float(ranges[_POINT_OF[name]].max()), _LEAST) / INT8_MAX
        return {
            f"{name}.weight": (weight / rows[:, None]).round().to(torch.int8),
            f"{name}.scale": (rows * scale)[None, None],
            f"{name}.step": torch.full((1, 1, 1), 1 / scale),
        }

    pre = {"input_norm": layer.input_norm.float()[None, None]} | projection("qkv")
    if layer.qkv_bias is not None:
        pre["qkv.bias"] = layer.qkv_bias.float()[None, None]
    post = projection("out") | {"mlp_norm": layer.mlp_norm.float()[None, None]}
    for name in ("gate", "up", "down"):
        post |= projection(name)
    return LayerTensors(pre, post)
