"""Linear layers by the products that a processor is fast at; the same values up to the order of summation.

float32: torch hands products to MKL, which on some processors of other makers than its own runs them at less than half the
speed of oneDNN's kernels. bfloat16: on a processor without such products torch has no kernel but a plain loop, a tenth as fast
as float32 products.
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


class WidenedLinear(nn.Linear):
    """A linear layer of bfloat16 values, multiplied and summed in float32 and rounded once, as a bfloat16 product rounds."""

    def forward(self, x: Tensor) -> Tensor:
        return widened(x, self.weight, self.bias)


def widen_linears(model: nn.Module) -> None:
    """Makes each `nn.Linear` of a bfloat16 model on the CPU a `WidenedLinear`, if the processor has no bfloat16 products."""
    if model.dtype != torch.bfloat16 or model.device.type != "cpu" or has_bfloat16_products():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WidenedLinear  # the parameters stay, and so do copies of the model


def has_bfloat16_products() -> bool:
    """Whether oneDNN has kernels for bfloat16 products on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer of x [..., in] by weight [out, in] and bias [out] or None, in float32; the result in x's dtype."""
    out = nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return out.to(x.dtype)


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer of x [..., in] by weight [out, in] and bias [out] or None, float32 products by oneDNN."""
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and not has_bfloat16_products():
        return widened(x, weight, bias)
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return nn.functional.linear(x, weight, bias)  # other dtypes run by oneDNN already
    out = torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.shape[-1]), weight, bias, "none", [], "")
    return out.view(*x.shape[:-1], weight.shape[0])
