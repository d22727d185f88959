"""The three operations that a sparse prefill spends its time in, natively or in torch, behind one choice.

And per-row lists read by tiles of rows, which the prefill does not use: a study measures them.

`choose` names the implementation; it is said at the start of a run and written in every row. The twins compute the same:
`native_kernels` in C++ (csrc), `torch_kernels` wherever there was no compiler.
"""

from typing import Protocol

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.kernels import native
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.types import Heads, Lists, Selection, UnionTiles

KERNELS = ("auto", "native", "torch")


class Kernels(Protocol):
    """q and out [H, Q, D] of the heads `heads`; k and v [G, K, D] of the whole layer; float32 accumulation."""

    name: str

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, heads: Heads, *, scale: float) -> Tensor:
        """Softmax attention of each row over its selected keys, in q's dtype. The lists must be valid: they are not checked.

        NaN and infinity propagate to the rows that keep the key they stand in (blocks: to all rows of the block).
        """
        ...

    def dense(self, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, causal_offset: int, scale: float) -> Tensor:
        """Causal attention on every key; row i sees the keys up to causal_offset + i."""
        ...

    def unite(self, selection: Selection, rows: int) -> UnionTiles:
        """Per-row lists as tiles of `rows` rows read them, up to 64. No list is changed."""
        ...

    def attend_tiles(self, q: Tensor, k: Tensor, v: Tensor, tiles: UnionTiles, heads: Heads, *, scale: float) -> Tensor:
        """`attend` on the lists that `tiles` are of. NaN and infinity in V reach every row of a tile that keeps the key."""
        ...

    def select(self, scores: Tensor, lists: Lists, *, out: Tensor | None = None) -> Selection:
        """The best keys of every list by scores [H, B, K], float32, float16 or int8 and free of NaN, ties to the lower key.

        The lists go into `out` int32 [lists.size], if given.
        """
        ...


def choose(kernel: str, *, head_dim: int, dtype: torch.dtype, device: torch.device = checks.CPU) -> Kernels:
    """The kernels that `auto`, `native` or `torch` stand for here.

    `auto` is native where it was built, for tensors in the CPU's memory whose head dimension (a multiple of 8 up to 256) and
    dtype (float32 or bfloat16) it can serve. Raises `InputError` where `native` was asked for and cannot be had.
    """
    checks.one_of("kernel", kernel, KERNELS)
    if kernel == "torch" or (kernel == "auto" and device != checks.CPU):
        return TorchKernels()
    if device != checks.CPU:
        raise InputError(f"kernel: native reads the CPU's memory, got tensors on {device}; choose kernel=auto or kernel=torch")
    fits = head_dim % 8 == 0 and 0 < head_dim <= 256 and dtype in (torch.float32, torch.bfloat16)
    if kernel == "auto":
        return NativeKernels() if fits and native.library() is not None else TorchKernels()
    if not fits:
        raise InputError(
            "kernel: native needs float32 or bfloat16 and a head dimension that is a multiple of 8 up to 256, got "
            f"{dtype} and {head_dim}; choose kernel=torch"
        )
    native.require()
    return NativeKernels()
