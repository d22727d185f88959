"""One compiled graph with its tensors bound: a call copies the inputs in and infers, nothing else."""

from collections.abc import Iterable
from dataclasses import dataclass

import openvino as ov
import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.exclusive import Exclusive
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.estimation import GraphForm
from shadowattn.graphs.symmetric_int8 import in_parts, quantise

_TORCH = {"f32": torch.float32, "f16": torch.float16, "i8": torch.int8, "i32": torch.int32}


class Arena:
    """The inputs and outputs of all graphs of a bank, one block a name, as large as the largest graph needs.

    Shared, because the outputs are what takes memory, not the graphs. torch owns it, so that nothing is copied on the way out.
    A run that is given memory writes there instead.
    `exclusive` guards it: one piece of work at a time.
    """

    def __init__(self, models: Iterable[ov.Model | ov.CompiledModel], exclusive: Exclusive | None = None):
        self.exclusive, models = exclusive or Exclusive(), list(models)
        sizes: dict[str, int] = {}
        for model in models:
            for port in (*model.inputs, *model.outputs):
                sizes[port.any_name] = max(sizes.get(port.any_name, 0), _bytes(port))
        self._outputs = {port.any_name for model in models for port in model.outputs}
        self._blocks = {name: _memory(size) if name in self._outputs else _memory(size).zero_() for name, size in sizes.items()}

    def block(self, name: str) -> Tensor:
        """Memory uint8 of all graphs' inputs or outputs of one name. Nobody should keep an output's: `renew_outputs`."""
        return self._blocks[name]

    def renew_outputs(self) -> None:
        """Hands the outputs' memory back, for memory that takes no room until a graph writes there."""
        self._blocks |= {name: _memory(self._blocks[name].numel()) for name in self._outputs}

    @property
    def bytes(self) -> int:
        """Bytes of inputs and outputs. Pages of an output that no graph has written take none of them."""
        return sum(block.numel() for block in self._blocks.values())


class Graph:
    """One compiled graph of the bank; `q_scale` and `k_scale` are None where the graph serves every bucket."""

    def __init__(
        self,
        model: ov.CompiledModel,
        shape: GraphShape,
        form: GraphForm,
        scales: tuple[float, float] | tuple[None, None],
        arena: Arena,
    ):
        self.model, self.shape, self.form = model, shape, form
        self.q_scale, self.k_scale = scales
        self._arena, self._exclusive = arena, arena.exclusive
        self._request = model.create_infer_request()
        with torch.inference_mode(False):  # as in `_memory`
            self._inputs = {port.any_name: _Layout.of(port).view(arena.block(port.any_name)) for port in model.inputs}
        self._output, self._output_name = _Layout.of(model.output(0)), model.output(0).any_name
        self._written = 0  # the address of the memory that the request writes to
        for index, port in enumerate(model.inputs):
            self._request.set_input_tensor(index, ov.Tensor(self._inputs[port.any_name].numpy(), shared_memory=True))

    def run(
        self,
        q: Tensor,
        k: Tensor,
        *,
        q_scales: Tensor | None = None,
        k_scales: Tensor | None = None,
        k_offset: Tensor | None = None,
        first_position: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Scores [heads, Q, K], or indices [heads, Q, top_k], for q [heads, Q, D] and k [kv_heads, K, D]; fewer where pooled.

        At most the graph's heads, rows and keys. `k_offset` [kv_heads, D] is subtracted from k first. Where the graph has no
        scales of its own, `q_scales` [heads] and `k_scales` [kv_heads] are what quantises; where it masks, the first row has
        position `first_position`. The result is a view of `out`, uint8 [`output_bytes`], where that is given. Else it is a
        copy; for work that holds the arena (`Exclusive.use`) it is a view of memory that the next run of any graph of the bank
        overwrites.
        """
        with self._exclusive.use() as outermost:
            output = self._output.view(self._arena.block(self._output_name) if out is None else out)
            scores = self._run(q, k, q_scales, k_scales, k_offset, first_position, output)
            return scores.clone() if outermost and out is None else scores

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        q_scales: Tensor | None,
        k_scales: Tensor | None,
        k_offset: Tensor | None,
        first_position: int,
        output: Tensor,
    ) -> Tensor:
        heads, rows, dim = q.shape
        kv_heads, keys, k_dim = k.shape
        sizes, room = (heads, rows, dim, kv_heads, keys, k_dim), self.shape
        most = (room.heads, room.rows, room.head_dim, room.kv_heads, room.keys, room.head_dim)
        if 0 in sizes or any(a > b for a, b in zip(sizes, most, strict=True)) or not dim == k_dim == room.head_dim:
            raise InputError(f"expected q and k that fit a graph of {room}, got {list(q.shape)} and {list(k.shape)}")
        # Heads, rows and keys past the given ones keep what an earlier run left: their scores are computed, never read.
        by_head = self._inputs["q"].view(self.shape.heads, self.shape.rows, dim)
        by_head[:heads, :rows] = quantise(q, q_scales) if self.form.takes_int8 else q
        first = 0
        for part in in_parts(k):  # of which quantising and subtracting make copies
            part = part if k_offset is None else part.float() - k_offset[:, None]
            into = self._inputs["k"][0, :kv_heads, first : first + part.shape[1]]
            into.copy_(quantise(part, k_scales) if self.form.takes_int8 else part)
            first += part.shape[1]
        if self.form.inputs == "runtime":
            self._inputs["q_steps"].view(self.shape.heads, -1)[:heads] = 1 / q_scales[:, None]
            self._inputs["k_steps"][0, :kv_heads, 0, 0] = 1 / k_scales
        if self.form.needs_multiplier:
            steps = q_scales * k_scales.repeat_interleave(self.shape.group)[:heads] / self.form.requant.value
            self._inputs["multiplier"].view(self.shape.heads, -1)[:heads] = steps[:, None]
        if self.form.mask:
            by_head[:heads, rows:] = by_head[:heads, rows - 1 : rows]  # a pooled block must not see what an earlier run left
            self._inputs["positions"][:] = torch.tensor([first_position, first_position + rows - 1], dtype=torch.int32)
        self._infer(output)
        row_block, key_block = self.form.pool
        out = output.view(self.shape.heads, self.shape.rows // row_block, -1)[:heads, : -(-rows // row_block)]
        out = out if self.form.indices else out[..., : -(-keys // key_block)]
        return out

    def infer(self) -> None:
        """One inference on whatever the inputs hold: what a call costs without the copies."""
        with self._exclusive.use():
            self._infer(self._output.view(self._arena.block(self._output_name)))

    def _infer(self, output: Tensor) -> None:
        if output.data_ptr() != self._written:  # telling OpenVINO takes as long as a small graph
            self._request.set_output_tensor(0, ov.Tensor(output.numpy(), shared_memory=True))
            self._written = output.data_ptr()
        self._request.infer(share_outputs=True)

    @property
    def output_bytes(self) -> int:
        """Memory that a run writes."""
        return self._output.bytes

    def release(self) -> None:
        """Hands back the memory between inputs and output; the next run allocates it again."""
        self.model.release_memory()


@dataclass(frozen=True)
class _Layout:
    """How a graph's input or output lies in memory. Asking the graph each time takes longer than a small inference."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int

    @classmethod
    def of(cls, port) -> "_Layout":
        return cls(_TORCH[port.element_type.get_type_name()], tuple(port.shape), _bytes(port))

    def view(self, memory: Tensor) -> Tensor:
        """The first bytes of memory uint8. Raises `InputError` where there are too few."""
        if len(memory) < self.bytes:
            raise InputError(f"out: expected {self.bytes} bytes of memory for what the graph computes, got {len(memory)}")
        return memory[: self.bytes].view(self.dtype).view(self.shape)


def _memory(size: int) -> Tensor:
    with torch.inference_mode(False):  # memory first used there would stay of that mode, and be refused outside
        return torch.empty(size, dtype=torch.uint8)


def _bytes(port) -> int:
    count = 1
    for length in port.shape:
        count *= length
    return count * port.element_type.size
