"""The paper's estimator by its short name: the native kernels, or graphs where there is an NPU to run them."""

import torch

from shadowattn.kernels import choose
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor


class Int8(Estimator):
    """INT8 products of Q and K by one of the classes that give the same integers; it stands for one, and none is made of it.

    `int8_fused` and `int8_graph` name one of them on every machine.
    """

    is_papers = True

    @classmethod
    def of_run(cls, *, graphs: bool) -> type[Estimator]:
        """For scales of a grid: a bank of `graphs`, or the native kernels."""
        return Int8Graph if graphs else Int8Fused

    @classmethod
    def of_tensors(cls, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> type[Estimator]:
        """For scales that are measured: the native kernels where they serve such q and k, see `kernels.choose`; elsewhere
        OpenVINO on the CPU, torch on other devices."""
        native = choose("auto", head_dim=head_dim, dtype=dtype, device=device).name == "native"
        return Int8Fused if native else Int8Tensor
