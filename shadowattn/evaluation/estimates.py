"""Ways to estimate scores, for comparing them: buckets, dynamic scales, fewer bits, smoothed keys, INT8 scores, NNCF's graph.

The integers are computed by float32 products, which are exact here; a test holds them to the graphs'.
"""

from collections.abc import Mapping
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
        self._seen = _value_figures({"q": (q, q8, scales[0]), "k": (keys, k8, scales[1])}, most)
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


class FixedGraph:
    """A compiled graph of one key head and its query heads, whoever quantised it: NNCF's, for one.

    `steps`: what the integers of its inputs `q` and `k` stand for, −128 … 127 of them.
    """

    def __init__(self, model: ov.CompiledModel, shape: GraphShape, steps: Mapping[str, float]):
        self._graph = Graph(model, shape, GraphForm(), (None, None), Arena([model]))
        self._steps = steps
        self._seen: dict[str, float] = {}

    def scores(self, q: Tensor, k: Tensor, rows: slice) -> Tensor:
        group, values = q.shape[0] // k.shape[0], {}
        for name, x in (("q", q), ("k", k.repeat_interleave(group, 0))):
            step = torch.full((len(x),), self._steps[name])
            values[name] = x, _integers(x, step, INT8_MAX, least=-INT8_MAX - 1), step
        self._seen = _value_figures(values, INT8_MAX)
        parts = [self._graph.run(q[g * group : (g + 1) * group], k[g : g + 1])[:, rows].clone() for g in range(k.shape[0])]
        return torch.cat(parts)

    def figures(self, scores: Tensor, visible: Tensor) -> dict[str, float]:
        return dict(self._seen)


def _value_figures(values: Mapping[str, tuple[Tensor, Tensor, Tensor]], most: int) -> dict[str, float]:
    """Of values [H, T, D], their integers and their scales [H], by name.

    Shares of heads that are clipped, of values lost to zero and cut at the end, of the 2 · most + 1 integers that a head uses.
    """
    clipped = [x.abs().amax((1, 2)) > scales * most * (1 + 1e-6) for x, _, scales in values.values()]
    made = {"clipped_heads": float(torch.stack(clipped).any(0).double().mean())}
    for name, (x, integers, scales) in values.items():
        levels = [len(head.unique()) for head in integers]
        made |= {
            f"{name}_zero": float(((integers == 0) & (x != 0)).double().mean()),
            f"{name}_saturated": float((x.abs() > (most + 0.5) * scales[:, None, None]).double().mean()),
            f"{name}_levels": sum(levels) / len(levels) / (2 * most + 1),
        }
    return made


def _integers(x: Tensor, scales: Tensor, most: int, *, least: int | None = None) -> Tensor:
    return torch.round(x / scales[:, None, None]).clamp(-most if least is None else least, most)
