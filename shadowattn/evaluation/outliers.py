"""Which heads static INT8 attention breaks, and why: sinks, outliers of Q and K, and what can be done about them beforehand.

A rescaling changes Q and K so that every row's softmax stays as it is: a vector taken off all keys of a head moves a row's scores
alike, and a factor on a channel of Q that the same channel of K is divided by changes no product. The factor can be folded into a
model's projections where the two channels that RoPE rotates into one another share it. The vector is taken after RoPE, so it has
to be subtracted from the keys themselves.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.prefill import prefill_chunks
from shadowattn.kernels.torch_kernels import dense
from shadowattn.models.shape import fingerprint, model_shape
from shadowattn.offline.scales import watch_attention
from shadowattn.online.chunk import Chunk
from shadowattn.online.full_int8 import AttentionRanges, FullInt8, Steps, full_int8

RESCALINGS = ("none", "offset", "equalised", "both")
_LEAST = 1e-6
Progress = Callable[[Tensor], Iterable[Tensor]]


@dataclass(frozen=True)
class Rescaling:
    """One layer's: K less `offset`, divided by `factor`; Q times `factor`. Both float32 [G, D]."""

    offset: Tensor
    factor: Tensor

    def __call__(self, chunk: Chunk) -> Chunk:
        """The chunk with Q and K rescaled, float32."""
        k = (chunk.k.float() - self.offset[:, None]) / self.factor[:, None]
        return Chunk.of(
            chunk.q.float() * self.factor[chunk.heads.kv][:, None], k, chunk.v.float(), scale=chunk.scale, layer=chunk.layer
        )


@dataclass
class Channels:
    """What one layer's channels were on calibration text: the largest |q| of a group's heads, and K's ends and mean; [G, D]."""

    q: Tensor
    lowest: Tensor
    highest: Tensor
    total: Tensor
    keys: int = 0

    def rescaling(self, name: str) -> Rescaling:
        """`offset`: the mean key; `equalised`: Q and K have the same range in every pair of channels; `both`; `none`."""
        none = torch.zeros_like(self.q)
        offset = self.total / self.keys if name in ("offset", "both") else none
        if name not in ("equalised", "both"):
            return Rescaling(offset, none + 1)
        k = torch.maximum(self.highest - offset, offset - self.lowest)
        return Rescaling(offset, (_rotated(k) / _rotated(self.q)).sqrt())


def _rotated(largest: Tensor) -> Tensor:
    """The larger of the two channels that RoPE rotates into one another, d and d + D / 2, for both."""
    halves = torch.maximum(*largest.chunk(2, -1)).clamp(min=_LEAST)
    return torch.cat([halves, halves], -1)


def observe_channels(model: PreTrainedModel, windows: Tensor, *, chunk_tokens: int, progress: Progress = iter) -> list[Channels]:
    """Runs the windows [W, T] through the model, dense, and keeps what every layer's channels were."""
    shape = model_shape(model)
    size = shape.kv_heads, shape.head_dim
    ends = 0.0, torch.inf, -torch.inf, 0.0
    seen = [Channels(*(torch.full(size, end, device=model.device) for end in ends)) for _ in range(shape.layers)]

    def observe(chunk: Chunk) -> None:
        channels, rows = seen[chunk.layer], chunk.q.shape[1]
        new = chunk.k[:, -rows:].float()
        of_group = chunk.q.float().reshape(size[0], -1, size[1])
        channels.q = torch.maximum(channels.q, of_group.abs().amax(1))
        channels.lowest = torch.minimum(channels.lowest, new.amin(1))
        channels.highest = torch.maximum(channels.highest, new.amax(1))
        channels.total, channels.keys = channels.total + new.sum(1), channels.keys + rows

    _each_chunk(model, windows, observe, chunk_tokens, progress)
    return seen


def observe_rescaled_ranges(
    model: PreTrainedModel, windows: Tensor, rescalings: Mapping[str, list[Rescaling]], *, chunk_tokens: int, progress=iter
) -> dict[str, AttentionRanges]:
    """`observe_attention_ranges` of every rescaling, by name; each a list of one `Rescaling` a layer."""
    shape = model_shape(model)
    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads, "scores": shape.heads}
    largest = {
        name: {key: torch.zeros(shape.layers, count, device=model.device) for key, count in heads.items()} for name in rescalings
    }

    def observe(chunk: Chunk) -> None:
        rows, hidden = chunk.q.shape[1], torch.arange(chunk.keys, device=chunk.k.device) > chunk.positions[:, None]
        for name, layers in rescalings.items():
            made = layers[chunk.layer](chunk)
            grouped = made.q.reshape(len(made.k), -1, made.q.shape[2])
            scores = (grouped @ made.k.mT).view(len(made.q), rows, -1).masked_fill(hidden, 0.0)
            found = {"q": made.q, "k": made.k[:, -rows:], "v": made.v[:, -rows:], "scores": scores}
            for key, x in found.items():
                table = largest[name][key]
                table[chunk.layer] = torch.maximum(table[chunk.layer], x.abs().amax((1, 2)))

    _each_chunk(model, windows, observe, chunk_tokens, progress)
    of = fingerprint(model)
    return {
        name: AttentionRanges(**{key: tuple(map(tuple, table.tolist())) for key, table in tables.items()}, fingerprint=of)
        for name, tables in largest.items()
    }


@dataclass(frozen=True)
class Candidate:
    """Whole attention in INT8 of a form, after a rescaling [L], with the ranges that were observed after it."""

    form: FullInt8
    rescaling: list[Rescaling]
    ranges: AttentionRanges


@dataclass(frozen=True)
class HeadErrors:
    """Sums over `rows` rows: of each candidate ‖out − dense‖² and of dense attention ‖out‖², [L, H]; what the heads are like.

    `sink` is the share of a row's probability on the first key, `q_outlier` and `k_outlier` the largest magnitude over the root
    mean square; means over chunks, [L, H].
    """

    error: dict[str, Tensor]
    norm: Tensor
    sink: Tensor
    q_outlier: Tensor
    k_outlier: Tensor
    rows: int

    def relative(self, name: str) -> Tensor:
        """‖out − dense‖ / ‖out‖ of every head, [L, H]."""
        return (self.error[name] / self.norm.clamp(min=_LEAST**2)).sqrt()


def measure_head_errors(
    model: PreTrainedModel, windows: Tensor, candidates: Mapping[str, Candidate], *, chunk_tokens: int, progress: Progress = iter
) -> HeadErrors:
    """Runs the windows [W, T] through the model, dense, and computes every chunk's attention by every candidate as well."""
    shape = model_shape(model)
    zeros = torch.zeros(shape.layers, shape.heads, dtype=torch.float64, device=model.device)
    sums = {name: zeros.clone() for name in (*candidates, "norm", "sink", "q_outlier", "k_outlier")}
    steps = {
        name: [Steps.of(one.ranges, layer, one.form.granularity, model.device) for layer in range(shape.layers)]
        for name, one in candidates.items()
    }
    chunks, rows = 0, 0

    def observe(chunk: Chunk) -> None:
        nonlocal chunks, rows
        layer, kv = chunk.layer, chunk.heads.kv
        q, k, v = chunk.q.float(), chunk.k.float(), chunk.v.float()
        exact = dense(q, k, v, causal_offset=chunk.first_position, scale=chunk.scale)
        sums["norm"][layer] += exact.double().square().sum((1, 2))
        sums["sink"][layer] += _sink_share(q, k[kv], chunk)
        for name, x in (("q_outlier", q), ("k_outlier", k[kv])):
            sums[name][layer] += x.abs().amax((1, 2)) / x.square().mean((1, 2)).sqrt().clamp(min=_LEAST)
        for name, one in candidates.items():
            out = full_int8(one.rescaling[layer](chunk), steps[name][layer], one.form)
            sums[name][layer] += (out - exact).double().square().sum((1, 2))
        if layer == 0:
            chunks, rows = chunks + 1, rows + q.shape[1]

    _each_chunk(model, windows, observe, chunk_tokens, progress)
    means = {name: (sums[name] / chunks).float() for name in ("sink", "q_outlier", "k_outlier")}
    return HeadErrors(error={name: sums[name] for name in candidates}, norm=sums["norm"], **means, rows=rows)


def _sink_share(q: Tensor, k: Tensor, chunk: Chunk) -> Tensor:
    """The mean over rows of the probability of key 0, [H]."""
    hidden = torch.arange(chunk.keys, device=k.device) > chunk.positions[:, None]
    logits = (q @ k.mT * chunk.scale).masked_fill(hidden, -torch.inf)
    return (logits[..., 0] - logits.logsumexp(-1)).exp().mean(1).double()


def _each_chunk(
    model: PreTrainedModel, windows: Tensor, observe: Callable[[Chunk], None], chunk_tokens: int, progress: Progress
) -> None:
    def attended(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request) -> None:
        observe(Chunk.of(q[0], k[0], v[0], scale=scale, layer=layer))

    with watch_attention(model, attended):
        for window in progress(windows):
            for _ in prefill_chunks(model, window, chunk_tokens=chunk_tokens):
                pass
