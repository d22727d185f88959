"""NPU-Full, the baseline that the paper starts from: a prompt's whole attention in static INT8, nothing selected (table 3).

An NPU's graph is built for one scale of each tensor, fixed beforehand from calibration text. What such a graph rounds is rounded
here: products of Q and K exactly, the softmax and the sum over V in float32.

With a key offset K is quantised less a fixed vector. That adds a constant to all scores of a row, to which the softmax is blind.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.exclusive import Exclusive
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.graphs.symmetric_int8 import shifted
from shadowattn.kernels.torch_kernels import dense
from shadowattn.models.registry import replace_attention
from shadowattn.models.shape import check_device, fingerprint
from shadowattn.online.attention import Counters, Request
from shadowattn.online.chunk import Chunk
from shadowattn.types import KEY_OFFSETS, KeyOffset

PROBABILITIES = ("linear", "log2", "float")
GRANULARITIES = ("tensor", "head")
# Rows whose scores exist at a time, of all heads: few enough that they stay in a CPU's caches from one step to the next. A GPU
# takes as many as _GPU_TILE_BYTES hold, two float32 a score: each tile is some dozen launches.
_CPU_TILE_ROWS, _GPU_TILE_BYTES = 32, 1 << 30
_OCTAVES = 127  # powers of two that 7 bits tell apart


@dataclass(frozen=True)
class AttentionRanges:
    """The largest magnitudes that a model's attention had on calibration text.

    `q` and `scores` [L][H]; `k` and `v` [L][G]. A score is q·k of a key that the row sees, before the softmax's own scale. With a
    `key_offset`, `k` and `scores` are those of k − offset.
    """

    q: tuple[tuple[float, ...], ...]
    k: tuple[tuple[float, ...], ...]
    v: tuple[tuple[float, ...], ...]
    scores: tuple[tuple[float, ...], ...]
    fingerprint: str  # of the model, as `models.fingerprint` gives it
    key_offset: KeyOffset | None = None

    def __post_init__(self):
        object.__setattr__(self, "key_offset", KeyOffset.read(self.key_offset))
        for name in ("q", "k", "v", "scores"):
            table = tuple(tuple(checks.numbers_of(name, layer)) for layer in checks.sequence(name, getattr(self, name)))
            if not table or len({len(layer) for layer in table}) != 1 or any(one < 0 for layer in table for one in layer):
                raise InputError(f"{name}: expected one magnitude for each layer and head, got {table!r:.80}; calibrate again")
            object.__setattr__(self, name, table)
        if len({len(table) for table in (self.q, self.k, self.v, self.scores)}) != 1:
            raise InputError("ranges: expected as many layers of q, k, v and scores; calibrate again")


@dataclass(frozen=True)
class Steps:
    """What one integer step of each tensor of a layer is worth: float32 [H] of q and of scores, [G] of k and of v.

    With a `key_offset`, k is what is left of the keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    key_offset: KeyOffset | None = None

    @classmethod
    def of(cls, ranges: AttentionRanges, layer: int, granularity: str, device: torch.device = checks.CPU) -> "Steps":
        """The largest magnitude / 127, of the layer's `tensor` as a whole or of each `head`; for tensors on a device."""
        steps = {}
        for name in ("q", "k", "v", "scores"):
            largest = torch.tensor(getattr(ranges, name)[layer], dtype=torch.float32, device=device)
            largest = largest.amax().expand_as(largest) if granularity == "tensor" else largest
            steps[name] = largest.clamp(min=torch.finfo(torch.float32).tiny * INT8_MAX) / INT8_MAX
        return cls(**steps, key_offset=ranges.key_offset)


@dataclass(frozen=True)
class FullInt8:
    """What of a prompt's attention is INT8: Q, K and V always, with the static scales of `AttentionRanges`.

    `scores`: also the scores that the softmax reads. `probabilities`: what multiplies V, in `linear` steps of 1/127, in powers of
    two (`log2`), or as they are (`float`). `granularity`: one scale for a layer's `tensor`, as on an NPU and in the paper, or one
    for each `head`. `key_offset`: `none`, or the calibration of the vector that is subtracted from K before it is quantised, with
    which the ranges must have been measured. The defaults are NPU-Full; the others say what of it costs quality.
    """

    scores: bool = True
    probabilities: str = "linear"
    granularity: str = "tensor"
    key_offset: str = "none"

    def __post_init__(self):
        checks.one_of("key_offset", self.key_offset, (*KEY_OFFSETS, "given"))
        checks.one_of("probabilities", self.probabilities, PROBABILITIES)
        checks.one_of("granularity", self.granularity, GRANULARITIES)
        checks.instance("scores", self.scores, bool, "give true or false")

    @contextmanager
    def __call__(
        self,
        model: PreTrainedModel,
        ranges: AttentionRanges,
        *,
        chunk_tokens: int = 128,
        observers: Sequence[Callable[[Chunk, Tensor], None]] = (),
    ) -> Iterator["FullInt8Attention"]:
        """Makes a Hugging Face causal LM compute its prompts' attention so, and undoes it on leaving.

        `ranges` as `shadowattn.calibrate(model, tokenizer, text).ranges` measures them. A decoding step attends in float.
        `observers` are given every chunk and its output [H, Q, D]. Raises `InputError` where the ranges are another model's, and
        on whatever `replace_attention` refuses, sliding windows included.
        """
        device = check_device(model)
        checks.instance("ranges", ranges, AttentionRanges, "measure them: shadowattn.calibrate(model, tokenizer, text).ranges")
        if ranges.fingerprint != fingerprint(model):
            raise InputError(
                "ranges: they were measured on another model; measure this one's: "
                "shadowattn.calibrate(model, tokenizer, text).ranges"
            )
        kind = "none" if ranges.key_offset is None else ranges.key_offset.how
        if kind != self.key_offset:
            raise InputError(
                f"ranges: they were measured with key_offset={kind}, got FullInt8(key_offset={self.key_offset!r}); measure them "
                f"with shadowattn.calibrate(model, tokenizer, text, key_offset={self.key_offset!r}).ranges"
            )
        attention = FullInt8Attention(self, ranges, chunk_tokens=chunk_tokens, observers=observers, device=device)
        with replace_attention(model, attention):
            yield attention


class FullInt8Attention:
    """Attention for all layers of a model, as `models.replace_attention` calls it."""

    def __init__(
        self,
        form: FullInt8,
        ranges: AttentionRanges,
        *,
        chunk_tokens: int = 128,
        observers=(),
        device: torch.device = checks.CPU,
    ):
        self.chunk_tokens = checks.integer("chunk_tokens", chunk_tokens, least=1)
        self.observers, self.counters = tuple(observers), Counters()
        self._form, self._exclusive = form, Exclusive()
        self._steps = [Steps.of(ranges, layer, form.granularity, device) for layer in range(len(ranges.q))]

    @torch.no_grad()
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request: Request) -> Tensor:
        """q [batch, H, Q, D], k and v [batch, G, K, D] with every cached key; returns [batch, H, Q, D] of q's dtype."""
        with self._exclusive.use():
            if request.decode:
                self.counters.decode_rows += q.shape[0] * q.shape[1] * q.shape[2]
                return dense(q, k, v, causal_offset=k.shape[2] - q.shape[2], scale=scale)
            return torch.stack([self._prompt(Chunk.of(*one, scale=scale, layer=layer)) for one in zip(q, k, v, strict=True)])

    def _prompt(self, prompt: Chunk) -> Tensor:
        out = torch.empty_like(prompt.q)
        for rows, chunk in prompt.split(self.chunk_tokens):
            out[:, rows] = full_int8(chunk, self._steps[prompt.layer], self._form)
            count, visible = len(chunk.heads), int((chunk.positions + 1).sum())
            self.counters.dense_rows += count * chunk.q.shape[1]
            self.counters.dense_visible += count * visible
            for observe in self.observers:
                observe(chunk, out[:, rows])
        return out


def full_int8(chunk: Chunk, steps: Steps, form: FullInt8 = FullInt8()) -> Tensor:
    """The attention of a chunk's rows, float32 [H, Q, D], as `reference.int8_attention` defines it; all heads of the layer.

    With a key offset, as it defines it for the keys that are left.
    """
    left = shifted(chunk.k, steps.key_offset, chunk.layer)
    q, k, v = (integers(x, step) for x, step in ((chunk.q, steps.q), (left, steps.k), (chunk.v, steps.v)))
    v *= steps.v[:, None, None]
    out = torch.empty_like(q)
    height = _CPU_TILE_ROWS if q.device.type == "cpu" else max(1, _GPU_TILE_BYTES // (8 * len(q) * k.shape[1]))
    for start in range(0, q.shape[1], height):
        rows = slice(start, start + height)
        out[:, rows] = _tile(q[:, rows], k, v, chunk.positions[rows], chunk, steps, form)
    return out


def _tile(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, chunk: Chunk, steps: Steps, form: FullInt8) -> Tensor:
    """Some rows q [H, R, D], as integers, at `positions`; k as integers and v as rounded values, [G, K, D]."""
    (heads, rows, dim), (groups, keys, _) = q.shape, k.shape
    # The query heads of a key head fold into rows: they share their keys, so K is not repeated.
    logits = (q.reshape(groups, -1, dim) @ k.mT).view(heads, rows, keys)
    logits *= (steps.q * steps.k[chunk.heads.kv])[:, None, None]
    if form.scores:
        logits = integers(logits, steps.scores).mul_(steps.scores[:, None, None])
    hidden = torch.arange(keys, device=logits.device) > positions[:, None]
    probabilities = torch.softmax(logits.mul_(chunk.scale).masked_fill_(hidden, -torch.inf), -1)
    return (rounded(probabilities, form.probabilities).view(groups, -1, keys) @ v).view(heads, rows, dim)


def integers(x: Tensor, steps: Tensor) -> Tensor:
    """Integers −127 … 127 as float32: round half to even of x [heads, rows, columns] / step [heads]."""
    return (x.float() / steps[:, None, None]).round_().clamp_(-INT8_MAX, INT8_MAX)


def rounded(probabilities: Tensor, how: str) -> Tensor:
    """Probabilities in steps of 1/127, or as the nearest power of two in the logarithm, 2⁻¹²⁷ or more; 0 stays 0."""
    if how == "linear":
        return (probabilities * INT8_MAX).round_().div_(INT8_MAX)
    if how == "log2":
        octaves = torch.round(-torch.log2(probabilities))
        return torch.exp2(-octaves).masked_fill_(octaves > _OCTAVES, 0.0)
    return probabilities
