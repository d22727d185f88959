"""Sensitivity: what it costs that one head alone keeps fewer keys. What the allocator `error_greedy` spends by."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.models.layerwise import Layerwise, layerwise
from shadowattn.models.linear import choose_linear
from shadowattn.models.shape import model_shape
from shadowattn.offline.ablations import TopK, head_variants
from shadowattn.offline.score_gradients import score_gradients
from shadowattn.offline.shared_ablations import measure_exactly
from shadowattn.offline.work import AblationWork, Progress, plan
from shadowattn.types import MEASURES, Sensitivity

# Outputs of a layer that exist at a time, one for each head and retention, and with each of them the MLP's inner activations.
_VARIANTS = 12
# (layer, window, changes of the layer's output [n, 1, T, C], its output [1, T, C]; float64) → numerators [n] and denominator of a
# cost, both to be summed over windows
_Cost = Callable[[int, int, Tensor, Tensor], tuple[Tensor, float]]


def measure_sensitivity(
    model: PreTrainedModel,
    windows: Tensor,
    units: Units,
    *,
    measure: str,
    retentions: Sequence[float],
    batch: int = 8,
    linear: str = "auto",
    seed: int = 0,
    progress: Progress = iter,
) -> Sensitivity:
    """The cost of each retention for each head, its keys chosen by exact scores, all other heads dense.

    `windows` int64 [W, T], long enough that a small retention leaves several keys. `error`: squared relative change of the hidden
    states that leave the head's layer, one layer's work for each figure. `divergence`: what this change does to the next-token
    distributions, KL divergence a token in nat, to second order and token by token: ½ Σₜ (Δₜ·gₜ)² / T, where gₜ is the gradient
    at the layer's output of the log-likelihood of tokens that the model itself draws (`seed`), so that E[ggᵀ] is the Fisher
    information; the same work and a backward pass a window. `loss`: increase of the mean loss in nat, as dear as an ablation.
    Raises `InputError` on an unknown measure and on retentions that do not ascend within (0, 1).
    """
    grid = sensitivity_grid(retentions)
    if measure not in MEASURES:
        raise InputError(f"sensitivity.measure: expected one of {', '.join(MEASURES)}, got {measure!r}")
    shape = model_shape(model)
    work = [piece for piece in plan(shape, batch) if piece.heads or piece.layer == shape.layers]
    options = {"batch": batch, "linear": linear, "progress": progress}
    if measure == "loss":
        table = [_losses(model, windows, units, work, retention, **options) for retention in grid]
    else:
        make_cost = (lambda: _relative_error) if measure == "error" else partial(_divergence, model, windows, seed)
        table = _layer_costs(model, windows, Units(units.folder / measure), work, grid, make_cost, **options)
    heads = range(shape.heads)
    cost = tuple(tuple((*(at[layer][h] for at in table), 0.0) for h in heads) for layer in range(shape.layers))
    return Sensitivity((*grid, 1.0), cost, measure, windows.numel())


def sensitivity_grid(retentions: Sequence[float]) -> list[float]:
    """The retentions to measure at, without 1, which costs nothing. Raises `InputError` unless they ascend in (0, 1)."""
    grid = [float(value) for value in retentions if value != 1]
    if not grid or grid != sorted(set(grid)) or grid[0] <= 0 or grid[-1] >= 1:
        raise InputError(f"sensitivity.retentions: expected ascending values in (0, 1), got {list(retentions)}")
    return grid


def _losses(model, windows: Tensor, units: Units, work: list[AblationWork], retention: float, **options) -> list[list[float]]:
    loss_units = Units(units.folder / f"loss@{retention:g}")
    measure_exactly(model, windows, loss_units, work, ablation=TopK(retention), **options)
    shape = model_shape(model)
    base = sum(loss_units.read(f"L{shape.layers}"))
    return [
        [(sum(loss_units.read(f"L{layer}_H{head}")) - base) / len(windows) for head in range(shape.heads)]
        for layer in range(shape.layers)
    ]


def _relative_error(layer: int, window: int, changes: Tensor, output: Tensor) -> tuple[Tensor, float]:
    return changes.square().sum((1, 2, 3)), float(output.square().sum())


def _divergence(model: PreTrainedModel, windows: Tensor, seed: int) -> _Cost:
    gradients = score_gradients(model, windows, seed=seed)

    def cost(layer: int, window: int, changes: Tensor, output: Tensor) -> tuple[Tensor, float]:
        along = (changes * gradients[layer][window].double()).sum(-1)
        return along.square().sum((1, 2)) / 2, float(windows.shape[1])

    return cost


def _layer_costs(
    model,
    windows: Tensor,
    units: Units,
    work: list[AblationWork],
    grid: list[float],
    make_cost: Callable[[], _Cost],
    *,
    batch: int,
    linear: str,
    progress: Progress,
) -> list[list[list[float]]]:
    """[retention][L][H]. A piece of work is done at all retentions, in one file for each head."""
    todo = [piece for piece in work if piece.heads and not all(units.has(key) for key in piece.keys)]
    if todo:
        cost = make_cost()
        with layerwise(model, windows.shape[1], choose_linear(linear)) as layers:
            hidden = torch.cat([layers.embed(ids) for ids in windows.to(model.device).split(batch)])
            at = 0
            for piece in progress(todo):
                while at < piece.layer:
                    for part in hidden.split(batch):
                        part.copy_(layers.layer(at, part))
                    at += 1
                costs = _head_costs(layers, piece.layer, piece.heads, hidden, grid, cost)
                for key, values in zip(piece.keys, costs, strict=True):
                    units.put(key, values)
    shape = model_shape(model)
    table = [[units.read(f"L{layer}_H{head}") for head in range(shape.heads)] for layer in range(shape.layers)]
    return [[[head[index] for head in layer] for layer in table] for index in range(len(grid))]


def _head_costs(
    layers: Layerwise, layer: int, heads: Sequence[int], hidden: Tensor, grid: list[float], cost: _Cost
) -> list[list[float]]:
    """[h][retention]. A few heads at a time, which share the layer's dense attention."""
    total = torch.zeros(len(heads), len(grid), dtype=torch.float64, device=hidden.device)
    norm, together = 0.0, max(1, _VARIANTS // len(grid))
    for window, part in enumerate(hidden.split(1)):
        dense = layers.layer(layer, part).double()
        for first in range(0, len(heads), together):
            some = heads[first : first + together]
            variants = head_variants([(head, TopK(retention)) for head in some for retention in grid])
            window_costs, of_norm = cost(layer, window, layers.varied(layer, part, variants).double() - dense, dense)
            total[first : first + together] += window_costs.view(len(some), -1)
        norm += of_norm
    return (total / norm).tolist()
