"""How many keys openvino-genai's sparse prefill reads: XAttention as the plugin's kernel chooses, tri-shape by its rule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.online.chunk import Chunk

PAGE = 32  # tokens in a block of the KV cache on the CPU
_DENSE_TAIL = 100  # the last tokens of a prompt, which tri-shape reads densely
_STEPS = 12
_CLOSE = 0.02  # of the share that is asked for
_LEAST = 1e-6  # a threshold at which only what is always kept is left

Layer = tuple[Tensor, Tensor]
"""Q [H, T, D] and K [G, T, D] of a prompt."""


class XAttention:
    """One layer of OpenVINO's paged attention with XAttention, on the CPU, for heads of one shape and products over √D.

    The operation does not say which blocks it chose. Values that name their block, one hot, make it: a row's output is then the
    attention of each block, which is 0 for those that are left out alone.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, properties: Mapping[str, Any]):
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self._compiled = core().compile_model(_paged_attention(heads, kv_heads, head_dim), "CPU", dict(properties))

    def attended(self, q: Tensor, k: Tensor, threshold: float, block: int, stride: int) -> Tensor:
        """Whether a row reads a block of keys, bool [H, T, B], of Q [H, T, D] and K [G, T, D]."""
        tokens = q.shape[1]
        blocks = -(-tokens // block)
        found = [
            self._outputs(q, k, _naming(tokens, block, start, self.head_dim), threshold, block, stride) > 0
            for start in range(0, blocks, self.head_dim)
        ]
        return torch.cat(found, 2)[:, :, :blocks]

    def _outputs(self, q: Tensor, k: Tensor, names: Tensor, threshold: float, block: int, stride: int) -> Tensor:
        tokens = q.shape[1]
        pages = -(-tokens // PAGE)
        lines = [x.float().transpose(0, 1).reshape(tokens, -1).numpy() for x in (q, k)]
        sizes = {"past": [0], "begins": [0, tokens], "pages": range(pages), "page_begins": [0, pages]}
        given: dict[str, Any] = {name: np.array(values, np.int32) for name, values in sizes.items()}
        given |= {"q": lines[0], "k": lines[1], "v": names.repeat(1, self.kv_heads).numpy()}
        given |= {name: self._cache(name, pages) for name in ("key_cache", "value_cache")}
        given |= {"longest": np.int32(tokens), "threshold": np.array([threshold], np.float32)}
        given |= {"block": np.int32(block), "stride": np.int32(stride)}
        out = self._compiled.create_infer_request().infer(given)[0]
        return torch.from_numpy(out.copy()).view(tokens, self.heads, self.head_dim).transpose(0, 1)

    def _cache(self, name: str, pages: int) -> ov.Tensor:
        port = self._compiled.input(name)
        _, *page = port.get_partial_shape()
        return ov.Tensor(port.get_element_type(), ov.Shape([pages, *(size.get_length() for size in page)]))


def _naming(tokens: int, block: int, start: int, width: int) -> Tensor:
    """Values [T, width] of which those in block `start` + i are 1 at i, and those in other blocks 0."""
    of_key = torch.arange(tokens) // block - start
    names = torch.zeros(tokens, width)
    named = (of_key >= 0) & (of_key < width)
    names[named, of_key[named]] = 1
    return names


def _paged_attention(heads: int, kv_heads: int, head_dim: int) -> ov.Model:
    """The operation alone; window, slopes, scores, rotation, sinks and what evicts keys are left out, as empty constants."""

    def given(name: str, shape: list[int] | ov.PartialShape, kind: Any) -> ov.Node:
        node = op.parameter(ov.PartialShape(shape), kind, name=name)
        node.output(0).set_names({name})
        return node

    def left_out(kind: Any, rank: int = 1) -> ov.Node:
        return op.constant(np.zeros((0,) * rank, kind))

    i32, f32, none = np.int32, np.float32, op.constant(np.int32(0))
    lines = [given("q", [-1, heads * head_dim], f32), *(given(name, [-1, kv_heads * head_dim], f32) for name in "kv")]
    caches = [given(name, ov.PartialShape.dynamic(4), ov.Type.dynamic) for name in ("key_cache", "value_cache")]
    places = [given(name, [-1], i32) for name in ("past", "begins", "pages", "page_begins")]
    longest = given("longest", [], i32)
    chosen = [given("threshold", [-1], f32), given("block", [], i32), given("stride", [], i32)]
    inputs = [
        *lines, *caches, *places, op.constant(f32(head_dim**-0.5)), none, left_out(f32), longest, left_out(i32),
        left_out(i32), left_out(i32), left_out(f32), *chosen, left_out(f32, 4), none,
        *(left_out(i32) for _ in range(4)), left_out(np.uint8), left_out(i32),
    ]  # fmt: skip
    node = ov.op._PagedAttentionExtension([one.output(0) for one in inputs])
    for kind in "kv":  # by which the plugin lays the cache out
        node.get_rt_info()[f"num_{kind}_heads"], node.get_rt_info()[f"{kind}_head_size"] = kv_heads, head_dim
    return ov.Model([op.result(node.output(0))], [*lines, *caches, *places, longest, *chosen], "attention")


def layers_of(model: PreTrainedModel, window: Tensor, *, chunk_tokens: int = 512) -> list[Layer]:
    """Q and K of every layer for a prompt int64 [T], attended to densely, rotated."""
    q: dict[int, list[Tensor]] = {}
    k: dict[int, Tensor] = {}

    def observe(chunk: Chunk) -> None:
        q.setdefault(chunk.layer, []).append(chunk.q.float().clone())
        if chunk.keys == len(window):
            k[chunk.layer] = chunk.k.float().clone()

    observe_prefill(model, window[None], observe, chunk_tokens=chunk_tokens)
    return [(torch.cat(q[layer], 1), k[layer]) for layer in sorted(q)]


def share(attended: Tensor, block: int) -> float:
    """The keys of the blocks that rows read, bool [H, T, B], of all keys that they see."""
    tokens, blocks = attended.shape[1:]
    of_block = (torch.arange(tokens)[:, None] + 1 - block * torch.arange(blocks)).clamp(0, block)
    return float((attended * of_block).sum() / (attended.shape[0] * of_block.sum()))


def density(layers: list[Layer], attention: XAttention, threshold: float, block: int, stride: int) -> float:
    """The share of the keys that XAttention reads, over all layers."""
    return float(np.mean([share(attention.attended(q, k, threshold, block, stride), block) for q, k in layers]))


def threshold_for(keep: float, found: Callable[[float], float]) -> float:
    """The threshold at which `found` gives the share `keep`, to a fiftieth of it. Raises `InputError` where none does."""
    low, high = _LEAST, 1.0
    least = found(low)
    if least > keep * (1 + _CLOSE):
        raise InputError(
            f"keep: expected at least {least:.3f}, which XAttention keeps at any threshold (its own block and the first), got "
            f"{keep}; keep more, or take smaller blocks"
        )
    for _ in range(_STEPS):
        middle = (low + high) / 2
        kept = found(middle)
        if abs(kept - keep) <= _CLOSE * keep:
            return middle
        low, high = (middle, high) if kept < keep else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class TriShape:
    """Reads the first `start` keys, the `recent` ones before a piece of `piece` tokens, in whole pages, and its own."""

    start: int
    recent: int
    piece: int

    def density(self, tokens: int) -> float:
        """The share of the keys that a prompt of `tokens` tokens reads; the piece in which its last 100 begin reads all."""
        kept, held = 0, self.start // PAGE + self.recent // PAGE
        for begin in range(0, tokens, self.piece):
            end = min(begin + self.piece, tokens)
            left_out = max(0, begin // PAGE - held) * PAGE if tokens - end >= _DENSE_TAIL else 0
            kept += (end * (end + 1) - begin * (begin + 1)) // 2 - left_out * (end - begin)
        return kept / (tokens * (tokens + 1) // 2)

    def recent_for(self, keep: float, tokens: int) -> int:
        """The number of recent keys with which the share is nearest to `keep`. Raises `InputError` where it would be none."""
        shares = {recent: TriShape(self.start, recent, self.piece).density(tokens) for recent in range(PAGE, tokens, PAGE)}
        if keep < min(shares.values()) * (1 - _CLOSE):
            raise InputError(
                f"keep: expected at least {min(shares.values()):.3f}, which tri-shape reads of {tokens} tokens in pieces of "
                f"{self.piece}, got {keep}; keep more, or take a smaller piece"
            )
        return min(shares, key=lambda recent: abs(shares[recent] - keep))
