"""Integers of any width, with buckets or without, for comparing them: dynamic scales, fewer bits, smoothed keys, INT8 scores.

The integers are computed by float32 products, which are exact here; a test holds them to the graphs'.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.graphs.buckets import DISTANCES, nearest_pair
from shadowattn.graphs.estimation import INT8_MAX
from shadowattn.graphs.symmetric_int8 import absmax_scales, products, shifted
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator, key_offset_of
from shadowattn.types import EstimateCost, KeyOffset, Requant, ScaleGrid


@dataclass(frozen=True)
class Integers:
    """Q and K of a chunk as integers: q8 [H, Q, D], k8 [H, K, D] with each head's own copy of its keys, and their scales [H]."""

    q: Tensor
    k: Tensor
    q_scales: Tensor
    k_scales: Tensor
    keys: Tensor  # [H, K, D], what became integers
    mean: Tensor  # [H, 1, D], the mean of the keys less the key offset: what `smooth` takes off


@dataclass(frozen=True)
class Quantised(Estimator):
    """Symmetric integers. `grid` None: every head by its own absmax, of the chunk's rows and of all keys so far (dynamic scales);
    else by its bucket.

    `bits` 8 or fewer; a grid's scales then hold the same range. `smooth`: the mean key is taken off before quantising, and its
    product with each row added again, exactly, so that rows stay comparable (a row's own ranking does not need it). The mean is
    that of all keys so far, later rows' included, so rounding depends on the chunk, as it does with dynamic scales: such a one
    says that it `sees` the chunk.
    `requant`: scores rounded to INT8 as the graph would. `key_offset`: a fixed vector subtracted from K before anything else; a
    grid brings its own. Scores are then q·(k − offset), nothing is added again, and only a row's own scores compare.
    """

    grid: ScaleGrid | None = None
    distance: str = "raw"
    bits: int = 8
    smooth: bool = False
    requant: Requant | None = None
    key_offset: KeyOffset | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"key_offset"})
    scores_are_finite: ClassVar[bool] = True  # products of integers

    def __post_init__(self):
        checks.fields(self, checks.integer, "bits", least=2, most=8)
        checks.fields(self, checks.one_of, "distance", options=DISTANCES)
        checks.fields(self, checks.flag, "smooth")
        if self.requant is not None:
            checks.instance("requant", self.requant, Requant, "give a shadowattn.types.Requant")
        if self.requant is not None and (self.smooth or self.bits < 8 or self.grid is None):
            raise InputError("requant: expected 8 bits, a grid and no smoothing, whose products it was calibrated on")
        key_offset_of(self.grid, self.key_offset)  # one beside a grid is refused now
        if self.grid is None or self.smooth:
            object.__setattr__(self, "sees", "chunk")

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        smoothing = 4 * head_dim * self.smooth  # the mean key, less it, and its product with the row
        return (
            EstimateCost.of(head_dim, self.bits)
            + EstimateCost.quantising(head_dim, keys=keys, offset=key_offset_of(self.grid, self.key_offset))
            + EstimateCost.deriving(smoothing, keys=keys)
            + EstimateCost.adding(2 * self.smooth)
        )

    def scores(self, chunk: Chunk) -> Tensor:
        operands = self._integers(chunk)
        product = products(operands.q, operands.k)
        if self.requant is not None:
            return torch.round(product * self._multipliers(operands)[:, None, None]).clamp(-128, 127)
        if self.smooth:
            return product * (operands.q_scales * operands.k_scales)[:, None, None] + chunk.q.float() @ operands.mean.mT
        return product

    def units(self, chunk: Chunk) -> Tensor:
        """1 where the mean key is added again, else a step of the product or of an INT8 score."""
        operands = self._integers(chunk)
        if self.smooth:
            return torch.ones(len(chunk.heads), device=chunk.q.device)
        steps = operands.q_scales * operands.k_scales
        return steps if self.requant is None else steps / self._multipliers(operands)

    @property
    def goes_by(self) -> str:
        """The chunk picks its bucket, where there is more than one."""
        return self.sees if self.grid is None or len(self.grid.pairs) == 1 else "chunk"

    def figures(self, chunk: Chunk, scores: Tensor, visible: Tensor) -> dict[str, float]:
        operands, most = self._integers(chunk), 2 ** (self.bits - 1) - 1
        values = {"q": (chunk.q, operands.q, operands.q_scales), "k": (operands.keys, operands.k, operands.k_scales)}
        figures = value_figures(values, most)
        if self.requant is None:
            return figures
        seen = scores[:, torch.arange(scores.shape[2], device=scores.device) < visible[:, None]]  # [H, pairs]
        return figures | {
            "score_zero": float((seen == 0).double().mean()),
            "score_saturated": float(((seen == -128) | (seen == 127)).double().mean()),
            "score_levels": _levels(seen, INT8_MAX) / 256,
        }

    def _integers(self, chunk: Chunk) -> Integers:
        return chunk.once(("integers", self), lambda: self._quantise(chunk))

    def _quantise(self, chunk: Chunk) -> Integers:
        q, kv = chunk.q.float(), chunk.heads.kv
        k = shifted(chunk.k, key_offset_of(self.grid, self.key_offset), chunk.layer).float()
        mean = k.mean(1, keepdim=True)
        keys = (k - mean if self.smooth else k)[kv]
        most = 2 ** (self.bits - 1) - 1
        measured = [absmax_scales(q), absmax_scales(keys)]
        scales = [x * (INT8_MAX / most) for x in (measured if self.grid is None else self._buckets(*measured))]
        return Integers(integers(q, scales[0], most), integers(keys, scales[1], most), *scales, keys, mean[kv])

    def _multipliers(self, operands: Integers) -> Tensor:
        pairs = zip(operands.q_scales.tolist(), operands.k_scales.tolist(), strict=True)
        return operands.q_scales.new_tensor([self.requant.multiplier(*pair) for pair in pairs])

    def _buckets(self, q_scales: Tensor, k_scales: Tensor) -> list[Tensor]:
        pairs = [
            self.grid.pairs[nearest_pair(self.grid.pairs, *both, distance=self.distance)]
            for both in zip(q_scales.tolist(), k_scales.tolist(), strict=True)
        ]
        return list(q_scales.new_tensor(pairs).unbind(1))


def value_figures(values: Mapping[str, tuple[Tensor, Tensor, Tensor]], most: int) -> dict[str, float]:
    """Of values [H, T, D], their integers and their scales [H], by name.

    Shares of heads that are clipped, of values lost to zero and cut at the end, of the 2 · most + 1 integers that a head uses.
    """
    clipped = [x.abs().amax((1, 2)) > scales * most * (1 + 1e-6) for x, _, scales in values.values()]
    figures = {"clipped_heads": float(torch.stack(clipped).any(0).double().mean())}
    for name, (x, integers, scales) in values.items():
        figures |= {
            f"{name}_zero": float(((integers == 0) & (x != 0)).double().mean()),
            f"{name}_saturated": float((x.abs() > (most + 0.5) * scales[:, None, None]).double().mean()),
            f"{name}_levels": _levels(integers, most) / (2 * most + 1),
        }
    return figures


def _levels(values: Tensor, most: int) -> float:
    """How many integers from -most - 1 to most values [H, ...] take, mean over heads."""
    span = 2 * (most + 1)
    first = most + 1 + span * torch.arange(len(values), device=values.device)[:, None]
    counts = torch.bincount((values.flatten(1).long() + first).flatten())
    return counts.count_nonzero().item() / len(values)


def integers(x: Tensor, scales: Tensor, most: int, *, least: int | None = None) -> Tensor:
    return torch.round(x / scales[:, None, None]).clamp(-most if least is None else least, most)
