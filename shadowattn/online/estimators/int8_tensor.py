"""INT8 scores with scales taken from the tensors themselves: `int8_graph` of `sparse_attention`, which has no bank.

OpenVINO multiplies on the CPU, torch anywhere else; the integers are the same.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import openvino as ov
import torch
from torch import Tensor

from shadowattn.exclusive import Exclusive
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import cpu_hints
from shadowattn.graphs.estimation import GraphForm, estimation_graph
from shadowattn.graphs.symmetric_int8 import absmax_scales, products, quantise, shifted
from shadowattn.online.chunk import Chunk, largest_key_scales
from shadowattn.online.estimators.base import Estimator, check_scales
from shadowattn.online.plan import Group
from shadowattn.threads import compile_hints, current_budget, thread_budget
from shadowattn.types import EstimateCost, KeyOffset

_LEAST_BYTES = 64 << 20  # of scores that there is room for; the system gives a page when it is first written to


class _ScoreMemory:
    """Room for one launch's scores, kept from launch to launch: in fresh memory every page of it is a fault, which together take
    longer than the products. A copy is a new one that nobody holds.
    """

    def __init__(self):
        self.exclusive = Exclusive()
        self._kept = torch.UntypedStorage(0)  # a storage, since a tensor also remembers torch's mode

    def scores(self, *shape: int) -> Tensor:
        """float32 of some shape: in the memory that is kept for work that holds it (`Exclusive.use`), else in its own."""
        with self.exclusive.use() as outermost:
            count = math.prod(shape)
            if outermost:
                return torch.empty(shape, dtype=torch.float32)
            if self._kept.nbytes() < 4 * count:
                self._kept = torch.UntypedStorage(0)  # handed back before there is more
                self._kept = torch.UntypedStorage(max(6 * count, _LEAST_BYTES))  # more than asked for: prompts grow
            return torch.empty(0, dtype=torch.float32).set_(self._kept, 0, shape)

    def __reduce__(self):
        return _ScoreMemory, ()


@dataclass(frozen=True)
class Int8Tensor(Estimator):
    """One scale for each query head and one for each key head; they leave the order of a row alone.

    Fixed for all rows, `of` the tensors; or, with none given, measured: of Q over the chunk's rows, of K over all keys so far.
    `key_offset` is subtracted from K before it is quantised; scales of K are then those of such keys.
    """

    q_scales: Tensor | None = None  # float32 [H]
    k_scales: Tensor | None = None  # float32 [G]
    key_offset: KeyOffset | None = None
    _memory: _ScoreMemory = field(default_factory=_ScoreMemory, init=False, repr=False, compare=False)
    needs: ClassVar[frozenset[str]] = frozenset({"key_offset"})
    scores_are_finite: ClassVar[bool] = True  # products of integers
    is_papers: ClassVar[bool] = True
    short_name: ClassVar[str] = "int8_graph"

    def __post_init__(self):
        object.__setattr__(self, "key_offset", KeyOffset.read(self.key_offset))
        if self.q_scales is not None or self.k_scales is not None:
            check_scales(q_scales=self.q_scales, k_scales=self.k_scales)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, *, key_offset: KeyOffset | None = None, layer: int = 0) -> "Int8Tensor":
        """Absmax scales of q [H, Q, D] and k [G, K, D], less the key offset of a layer if any."""
        return cls(absmax_scales(q), absmax_scales(shifted(k, key_offset, layer)), key_offset)

    @property
    def goes_by(self) -> str:
        """The chunk, where it measures the scales."""
        return self.sees if self.q_scales is not None else "chunk"

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        return EstimateCost.of(head_dim, 8) + EstimateCost.quantising(head_dim, keys=keys, offset=self.key_offset)

    def scores(self, chunk: Chunk) -> Tensor:
        """The integer products, exact in float32."""
        sizes = (*chunk.q.shape[:2], chunk.keys)
        on_cpu = chunk.q.device.type == "cpu"
        return self._into(self._memory.scores(*sizes) if on_cpu else torch.empty(sizes, device=chunk.q.device), chunk)

    def launch(self, chunk: Chunk, group: Group, *, out: Tensor | None = None) -> Tensor:
        part = chunk[group.heads]
        return self.scores(part) if out is None else self._into(out.view(torch.float32).view(*part.q.shape[:2], part.keys), part)

    def room(self, chunk: Chunk, group: Group) -> int:
        return 4 * chunk.q.shape[1] * chunk.keys

    def _into(self, scores: Tensor, chunk: Chunk) -> Tensor:
        q, k, heads = chunk.q, chunk.k, chunk.heads
        q_scales, k_scales = self._scales(chunk)
        q8 = quantise(q, q_scales)
        groups = [(slice(group, group + 1), part) for group, part in heads.grouped()]
        span = slice(groups[0][0].start, groups[-1][0].stop)
        if len({part.stop - part.start for _, part in groups}) == 1 and span.stop - span.start == len(groups):
            groups = [(span, slice(0, len(heads)))]  # neighbouring groups of one size share a launch
        for group, part in groups:
            # A group's query heads fold into rows: they share their keys, so K is not repeated.
            k8 = quantise(shifted(k, self.key_offset, chunk.layer, group), k_scales[group])[None]
            rows = q8[part].reshape(1, k8.shape[1], -1, q8.shape[2])
            _multiply(rows, k8, scores[part].view(1, k8.shape[1], -1, k.shape[1]))
        return scores

    @property
    def reuses_scores(self) -> bool:
        """Yes: a launch of work that holds the memory overwrites those of the one before."""
        return True

    def use(self) -> AbstractContextManager:
        """The memory of its scores."""
        return self._memory.exclusive.use()

    def units(self, chunk: Chunk) -> Tensor:
        """A step of the integer product."""
        q_scales, k_scales = self._scales(chunk)
        return q_scales * k_scales[chunk.heads.kv]

    def _scales(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Of the chunk's query heads, and of all key heads."""
        if self.q_scales is None or self.k_scales is None:
            return absmax_scales(chunk.q), largest_key_scales(chunk, self.key_offset)
        return self.q_scales[chunk.heads.ids], self.k_scales


def _multiply(q8: Tensor, k8: Tensor, scores: Tensor) -> None:
    """Products of q8 [1, G, rows, D] and k8 [1, G, K, D] into scores [1, G, rows, K]."""
    if q8.device.type != "cpu":
        scores.copy_(products(q8, k8))
        return
    _, groups, rows, dim = q8.shape
    request = _compiled(GraphShape(groups, rows, dim, k8.shape[2]), current_budget()).create_infer_request()
    inputs = [x.contiguous().numpy() for x in (q8, k8)]  # held until the request is done: OpenVINO keeps only their addresses
    for index, x in enumerate(inputs):
        request.set_input_tensor(index, ov.Tensor(x, shared_memory=True))
    request.set_output_tensor(0, ov.Tensor(scores.numpy(), shared_memory=True))
    request.infer(share_outputs=True)


@lru_cache(maxsize=16)
def _compiled(shape: GraphShape, threads: int | None) -> ov.CompiledModel:
    with thread_budget(threads):
        hints = cpu_hints() | compile_hints()
        return core().compile_model(estimation_graph(shape, GraphForm("unit")), "CPU", hints)
