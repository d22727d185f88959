"""Ways to estimate scores, for comparing them: buckets, dynamic scales, fewer bits, smoothed keys, INT8 scores, NNCF's graph.

The integers are computed by float32 products, which are exact here; a test holds them to the graphs'.
"""

from dataclasses import dataclass
from typing import Protocol

import openvino as ov
import torch
from torch import Tensor

from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape, nearest_pair
from shadowattn.graphs.estimation import INT8_MAX, GraphForm
from shadowattn.graphs.graph import Arena, Graph
from shadowattn.graphs.quantize import absmax_scales
from shadowattn.types import Requant, ScaleGrid


class Estimate(Protocol):
    """Something that scores keys, and has something to say about how it did."""

    def scores(self, q: Tensor, k: Tensor, rows: slice) -> Tensor:
        """float32 [H, rows, K] for some `rows` of a chunk q [H, Q, D], and all keys so far k [G, K, D]."""
        ...

    def figures(self, scores: Tensor, visible: Tensor) -> dict[str, float]:
        """Shares and counts of the chunk just scored, `visible` [rows] keys a row."""
        ...


@dataclass
class Quantised:
    """Symmetric integers. `grid` None: every head by its own absmax, measured on the chunk (dynamic scales); else by its bucket.

    `bits` 8 or fewer; a grid's scales then hold the same range. `smooth`: the mean key is taken off before quantising, and its
    product with each row added again, exactly, so that rows stay comparable (a row's own ranking does not need it).
    `requant`: scores rounded to INT8 as the graph would.
    """

    grid: ScaleGrid | None = None
    distance: str = "raw"
    bits: int = 8
    smooth: bool = False
    requant: Requant | None = None

    def __post_init__(self):
        if not 2 <= self.bits <= 8:
            raise InputError(f"bits: expected 2 … 8, got {self.bits}")
        if self.requant is not None and (self.smooth or self.bits < 8 or self.grid is None):
            raise InputError("requant: expected 8 bits, a grid and no smoothing, whose products it was calibrated on")
        self._seen: dict[str, float] = {}

    def scores(self, q: Tensor, k: Tensor, rows: slice) -> Tensor:
        group = q.shape[0] // k.shape[0]
        mean = k.mean(1, keepdim=True)
        keys = (k - mean if self.smooth else k).repeat_interleave(group, 0)
        most = 2 ** (self.bits - 1) - 1
        measured = [absmax_scales(q), absmax_scales(keys)]
        scales = [x * (INT8_MAX / most) for x in (measured if self.grid is None else self._buckets(*measured))]
        q8, k8 = (_integers(x, scale, most) for x, scale in zip((q, keys), scales, strict=True))
        self._count(q, keys, q8, k8, measured, scales, most)
        product = q8[:, rows] @ k8.mT
        if self.requant is not None:
            multipliers = torch.tensor(
                [self.requant.multiplier(*pair) for pair in zip(*(s.tolist() for s in scales), strict=True)]
            )
            return torch.round(product * multipliers[:, None, None]).clamp(-128, 127)
        if self.smooth:
            return product * (scales[0] * scales[1])[:, None, None] + q[:, rows] @ mean.repeat_interleave(group, 0).mT
        return product

    def figures(self, scores: Tensor, visible: Tensor) -> dict[str, float]:
        if self.requant is None:
            return dict(self._seen)
        seen = scores[:, torch.arange(scores.shape[2]) < visible[:, None]]  # [H, pairs]
        levels = [len(head.unique()) for head in seen]
        return self._seen | {
            "score_zero": float((seen == 0).double().mean()),
            "score_saturated": float(((seen == -128) | (seen == 127)).double().mean()),
            "score_levels": sum(levels) / len(levels) / 256,
        }

    def _buckets(self, q_scales: Tensor, k_scales: Tensor) -> list[Tensor]:
        pairs = [
            self.grid.pairs[nearest_pair(self.grid.pairs, *both, distance=self.distance)]
            for both in zip(q_scales.tolist(), k_scales.tolist(), strict=True)
        ]
        return list(torch.tensor(pairs).unbind(1))

    def _count(self, q, keys, q8, k8, measured, scales, most) -> None:
        """Shares of heads and of values, and of the integers that a head's values make use of."""
        above = most / INT8_MAX
        clipped = [m > s * above * (1 + 1e-6) for m, s in zip(measured, scales, strict=True)]
        self._seen = {"clipped_heads": float((clipped[0] | clipped[1]).double().mean())}
        for name, x, x8, scale in (("q", q, q8, scales[0]), ("k", keys, k8, scales[1])):
            levels = [len(head.unique()) for head in x8]
            self._seen |= {
                f"{name}_zero": float(((x8 == 0) & (x != 0)).double().mean()),
                f"{name}_saturated": float((x.abs() > (most + 0.5) * scale[:, None, None]).double().mean()),
                f"{name}_levels": sum(levels) / len(levels) / (2 * most + 1),
            }


class FixedGraph:
    """A compiled graph of one key head and its query heads, whoever quantised it: NNCF's, for one."""

    def __init__(self, model: ov.CompiledModel, shape: GraphShape):
        self._graph = Graph(model, shape, GraphForm(), (None, None), Arena([model]))

    def scores(self, q: Tensor, k: Tensor, rows: slice) -> Tensor:
        group = q.shape[0] // k.shape[0]
        parts = [self._graph.run(q[g * group : (g + 1) * group], k[g : g + 1])[:, rows].clone() for g in range(k.shape[0])]
        return torch.cat(parts)

    def figures(self, scores: Tensor, visible: Tensor) -> dict[str, float]:
        return {}


def _integers(x: Tensor, scales: Tensor, most: int) -> Tensor:
    return torch.round(x / scales[:, None, None]).clamp(-most, most)
