"""float32 linear layers through oneDNN, where torch has it.

torch hands float32 products to MKL, which on processors of other makers than its own runs them at less than half the speed of
oneDNN's kernels. The products are the same up to the order of summation.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from shadowattn.errors import InputError

LINEARS = ("auto", "onednn", "torch")
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [..., in], weight [out, in], bias [out] or None) → [..., out]."""


def choose_linear(name: str) -> Linear:
    """`onednn`, `torch`, or with `auto` oneDNN where it is. Raises `InputError` on an unknown or missing one."""
    if name not in LINEARS:
        raise InputError(f"importance.linear: expected one of {', '.join(LINEARS)}, got {name!r}")
    if name == "onednn" and not has_onednn():
        raise InputError("importance.linear: expected a torch with oneDNN for onednn, got one without; use torch")
    return onednn if name != "torch" and has_onednn() else nn.functional.linear


def has_onednn() -> bool:
    """Whether this torch can run a linear layer by oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@contextmanager
def replace_linears(model: nn.Module, linear: Linear) -> Iterator[None]:
    """Every plain `nn.Linear` inside `model` computed by `linear`; undone on leaving."""
    with ExitStack() as undo:
        for module in model.modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                module.forward = partial(_forward, module, linear)
                undo.callback(vars(module).pop, "forward")
        yield


def _forward(module: nn.Linear, linear: Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer of x [..., in] by weight [out, in] and bias [out] or None, float32 products by oneDNN."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return nn.functional.linear(x, weight, bias)  # other dtypes run by oneDNN already
    out = torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.shape[-1]), weight, bias, "none", [], "")
    return out.view(*x.shape[:-1], weight.shape[0])
