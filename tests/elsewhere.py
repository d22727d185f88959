"""What has to run where the model is: on the GPU that torch finds, else on a device that is pretended.

The pretended device's tensors say that they are on `cuda`, hold their values in the CPU's memory, and refuse its tensors.
Numbers there are the CPU's; what tests learn is where tensors are.
An operator that meets tensors of both devices raises, as CUDA's would, unless one has no dimension; numpy gets no view of the
values; and every copy between the two is counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cuda")
_ATEN = torch.ops.aten
_NO_CUDA = ("not linked with support", "CUDA driver version is insufficient", "no NVIDIA driver")  # torch with CUDA and without
_READ = (Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__bool__, Tensor.__index__)


class Pretended(Tensor):
    """A tensor on the pretended device, around one in the CPU's memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return Tensor._make_wrapper_subclass(cls, inner.shape, **layout, device=DEVICE)

    def __init__(self, inner: Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func}: a pretended tensor outside of pretend_device()")


@dataclass
class Copies:
    """Elements that went from the device to the CPU and the other way, each copy by itself."""

    down: list[int]
    up: list[int]

    def clear(self) -> None:
        self.down.clear()
        self.up.clear()


@contextmanager
def elsewhere() -> Iterator[Copies]:
    """`device="cuda"` inside is the GPU that torch finds, or else the pretended device; copies are counted on both."""
    if not HAS_GPU:
        with pretend_device() as copies:
            yield copies
        return
    copies = Copies([], [])
    with _Counted(copies):
        yield copies


@contextmanager
def pretend_device() -> Iterator[Copies]:
    """`device="cuda"` is the pretended device inside."""
    copies, lazy_init, future = Copies([], []), torch.cuda._lazy_init, torch.__future__
    overwrite = future.get_overwrite_module_params_on_conversion()
    torch.cuda._lazy_init = lambda: None  # factories ask for it before they are dispatched
    future.set_overwrite_module_params_on_conversion(True)  # a parameter in place would lose its values
    try:
        with _Functions(copies), _Operators(copies):
            yield copies
    finally:
        torch.cuda._lazy_init = lazy_init
        future.set_overwrite_module_params_on_conversion(overwrite)


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its parameters and buffers on the device, in place; inside of `elsewhere` or `pretend_device`."""
    return module.to(DEVICE)


def _inner(x):
    return x.inner if isinstance(x, Pretended) else x


def _check_one_device(func, given: list) -> None:
    tensors = [x for x in given if isinstance(x, Tensor)]
    elsewhere = [x for x in tensors if not isinstance(x, Pretended) and x.dim()]
    if elsewhere and any(isinstance(x, Pretended) for x in tensors):
        raise RuntimeError(f"{func}: expected all tensors on {DEVICE}, got {[list(x.shape) for x in elsewhere]} on the CPU")


def _is_on_device(device) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


class _Counted(TorchDispatchMode):
    """Counts what a GPU and the CPU copy to each other, but for tensors made from Python's numbers."""

    def __init__(self, copies: Copies):
        super().__init__()
        self._copies = copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is _ATEN._local_scalar_dense.default and args[0].is_cuda:
            self._copies.down.append(1)
        elif func in (_ATEN.copy_.default, _ATEN._to_copy.default):
            source = args[1] if func is _ATEN.copy_.default else args[0]
            if source.is_cuda != made.is_cuda:
                (self._copies.down if source.is_cuda else self._copies.up).append(source.numel())
        return made


class _Functions(TorchFunctionMode):
    """What Python's bindings do before an operator is dispatched: they would ask CUDA."""

    def __init__(self, copies: Copies):
        super().__init__()
        self._copies = copies

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _READ and isinstance(args[0], Pretended):
            self._copies.down.append(args[0].numel())
            return func(args[0].inner, *args[1:], **kwargs)
        if func in (torch.tensor, torch.as_tensor) and _is_on_device(kwargs.get("device")):
            made = func(*args, **(kwargs | {"device": "cpu"}))
            self._copies.up.append(made.numel())
            return Pretended(made)
        options = (*args[1:], *kwargs.values())
        if func is Tensor.to and any(_is_on_device(x) for x in options if isinstance(x, torch.device | str)):
            return self._moved(args[0], [x for x in options if isinstance(x, torch.dtype)])
        if func is Tensor.new_tensor and isinstance(args[0], Pretended):
            return Pretended(torch.tensor(args[1], **({"dtype": args[0].dtype} | kwargs)))
        if isinstance(kwargs.get("out"), Pretended):  # within, views of it would be made anew
            _check_one_device(func, tree_leaves((args, kwargs)))
            func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
            return kwargs["out"]
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not any(reason in str(error) for reason in _NO_CUDA):
                raise
        # A binding that sets CUDA's device before it dispatches.
        if func is Tensor.copy_ and not isinstance(args[1], Pretended):
            self._copies.up.append(args[1].numel())
        else:
            _check_one_device(func, tree_leaves(args))
        made = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return args[0] if made is args[0].inner else Pretended(made) if isinstance(made, Tensor) else made

    def _moved(self, x: Tensor, dtypes: list[torch.dtype]) -> Tensor:
        x = x.to(dtypes[0]) if dtypes else x
        if isinstance(x, Pretended):
            return x
        self._copies.up.append(x.numel())
        return Pretended(x.detach().clone())


class _Operators(TorchDispatchMode):
    def __init__(self, copies: Copies):
        super().__init__()
        self._copies = copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        here = [x for x in leaves if isinstance(x, Pretended)]
        device, given = kwargs.get("device"), kwargs.get("device") is not None
        if func is not _ATEN.copy_.default:
            _check_one_device(func, leaves)
        if func is _ATEN._local_scalar_dense.default and here:
            self._copies.down.append(1)
            return here[0].inner.item()
        if func is _ATEN._fused_sdp_choice.default:
            return torch.nn.attention.SDPBackend.MATH.value
        if func is _ATEN.copy_.default and len(here) == 1:
            (self._copies.up if here[0] is args[0] else self._copies.down).append(args[1].numel())
        wrapped = _is_on_device(device) if given else bool(here)
        if func is _ATEN._to_copy.default and given and wrapped != bool(here):
            (self._copies.up if wrapped else self._copies.down).append(args[0].numel())
        if func is _ATEN.copy_.default:
            wrapped = isinstance(args[0], Pretended)
        if given:
            kwargs["device"] = torch.device("cpu") if wrapped else device
        made = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if not wrapped:
            return made
        same = {id(x.inner): x for x in here}  # what an operator changed in place comes back as it is
        return tree_map(lambda x: (same[id(x)] if id(x) in same else Pretended(x)) if isinstance(x, Tensor) else x, made)
