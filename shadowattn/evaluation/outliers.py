"""Which heads static INT8 attention breaks, and why: sinks, outliers of Q and K, and what can be done about them beforehand.

A rescaling changes Q and K so that every row's softmax stays as it is: a vector taken off all keys of a head moves a row's scores
alike, and a factor on a channel of Q that the same channel of K is divided by changes no product. The factor can be folded into a
model's projections where the two channels that RoPE rotates into one another share it. The vector is taken after RoPE, so it has
to be subtracted from the keys themselves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.observe import observe_prefill
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.graphs.symmetric_int8 import shifted
from shadowattn.kernels.torch_kernels import dense
from shadowattn.models.shape import model_shape
from shadowattn.online.chunk import Chunk
from shadowattn.online.full_int8 import AttentionRanges, FullInt8, Steps, full_int8
from shadowattn.types import KeyOffset

RESCALINGS = ("none", "offset", "equalised", "both")
_LEAST = 1e-6
_SIGNALS = ("sink", "small", "q_outlier", "k_outlier")
_HALF_A_STEP = 0.5 / INT8_MAX
Progress = Callable[[Tensor], Iterable[Tensor]]


@dataclass(frozen=True)
class Rescaling:
    """K less a key offset, if any, and divided by `factor`; Q times `factor`. The factors are float32 [L][G, D]."""

    key_offset: KeyOffset | None
    factor: Sequence[Tensor]

    def __call__(self, chunk: Chunk) -> Chunk:
        """The chunk with Q and K rescaled, float32."""
        factor = self.factor[chunk.layer]
        q = chunk.q.float() * factor[chunk.heads.kv][:, None]
        k = shifted(chunk.k, self.key_offset, chunk.layer).float() / factor[:, None]
        return replace(chunk, q=q, layer_q=q, k=k, v=chunk.v.float())


@dataclass
class Channels:
    """What one layer's channels were on calibration text: the largest |q| of a group's heads, and K's ends; [G, D]."""

    q: Tensor
    lowest: Tensor
    highest: Tensor

    def factor(self, offset: Tensor | None) -> Tensor:
        """For Q, and for K less the `offset` [G, D] its inverse: then their ranges meet in every pair of channels."""
        offset = torch.zeros_like(self.q) if offset is None else offset.to(self.q.device)
        return (_rotated(torch.maximum(self.highest - offset, offset - self.lowest)) / _rotated(self.q)).sqrt()


def rescalings(channels: Sequence[Channels], mean_key: KeyOffset) -> dict[str, Rescaling]:
    """By name: `none`; `offset`, the mean key; `equalised`, Q and K of one range in every pair of channels; `both`."""
    ones = [torch.ones_like(layer.q) for layer in channels]
    equal = [layer.factor(None) for layer in channels]
    both = [layer.factor(mean_key.of(number)) for number, layer in enumerate(channels)]
    candidates = (Rescaling(None, ones), Rescaling(mean_key, ones), Rescaling(None, equal), Rescaling(mean_key, both))
    return dict(zip(RESCALINGS, candidates, strict=True))


def _rotated(largest: Tensor) -> Tensor:
    """The larger of the two channels that RoPE rotates into one another, d and d + D / 2, for both."""
    halves = torch.maximum(*largest.chunk(2, -1)).clamp(min=_LEAST)
    return torch.cat([halves, halves], -1)


def observe_channels(model: PreTrainedModel, windows: Tensor, *, chunk_tokens: int, progress: Progress = iter) -> list[Channels]:
    """Runs the windows [W, T] through the model, dense, and keeps what every layer's channels were."""
    shape = model_shape(model)
    size = shape.kv_heads, shape.head_dim
    ends = 0.0, torch.inf, -torch.inf
    seen = [Channels(*(torch.full(size, end, device=model.device) for end in ends)) for _ in range(shape.layers)]

    def observe(chunk: Chunk) -> None:
        channels, new = seen[chunk.layer], chunk.k[:, -chunk.q.shape[1] :].float()
        of_group = chunk.q.float().reshape(size[0], -1, size[1])
        channels.q = torch.maximum(channels.q, of_group.abs().amax(1))
        channels.lowest = torch.minimum(channels.lowest, new.amin(1))
        channels.highest = torch.maximum(channels.highest, new.amax(1))

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    return seen


@dataclass(frozen=True)
class Candidate:
    """Whole attention in INT8 of a form, after a rescaling, with the ranges that were observed after it."""

    form: FullInt8
    rescaling: Rescaling
    ranges: AttentionRanges


@dataclass(frozen=True)
class HeadErrors:
    """Sums over `rows` rows: of each candidate ‖out − dense‖² and of dense attention ‖out‖², [L, H]; what the heads are like.

    `sink` is the share of a row's probability on the first key, `small` its share in probabilities that steps of 1/127 round to
    zero, `q_outlier` and `k_outlier` the largest magnitude over the root mean square; means over chunks, [L, H].
    """

    error: dict[str, Tensor]
    norm: Tensor
    sink: Tensor
    small: Tensor
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
    sums = {name: zeros.clone() for name in (*candidates, "norm", *_SIGNALS)}
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
        probability = _probabilities(q, k[kv], chunk)
        sums["sink"][layer] += probability[..., 0].mean(1).double()
        sums["small"][layer] += probability.where(probability < _HALF_A_STEP, 0).sum(2).mean(1).double()
        for name, x in (("q_outlier", q), ("k_outlier", k[kv])):
            sums[name][layer] += x.abs().amax((1, 2)) / x.square().mean((1, 2)).sqrt().clamp(min=_LEAST)
        for name, one in candidates.items():
            out = full_int8(one.rescaling(chunk), steps[name][layer], one.form)
            sums[name][layer] += (out - exact).double().square().sum((1, 2))
        if layer == 0:
            chunks, rows = chunks + 1, rows + q.shape[1]

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    means = {name: (sums[name] / chunks).float() for name in _SIGNALS}
    return HeadErrors(error={name: sums[name] for name in candidates}, norm=sums["norm"], **means, rows=rows)


def _probabilities(q: Tensor, k: Tensor, chunk: Chunk) -> Tensor:
    """Of every row and key, [H, Q, K]."""
    hidden = torch.arange(chunk.keys, device=k.device) > chunk.positions[:, None]
    return (q @ k.mT * chunk.scale).masked_fill(hidden, -torch.inf).softmax(-1)
