"""Importance by racing: an ablation stops once more windows would not change what the allocator makes of it.

In rounds, each of half as many windows again as there were. After a round every ablation that is still running has a mean loss
increase over the windows so far and a standard error of it, paired window by window with the unchanged model, as an
estimate of the mean over all windows: the error is zero where all are measured. It is settled where moving it by `z`
standard errors, either way, moves no retention by more than `tolerance` of the mean and, since even heads that keep the
floor are to be ranked, where few others lie within its interval.

`replay_race` says what a race in any order of the windows would have measured, from the losses of all windows: how far races
are from the exact profile is measured over many orders that way (`python -m experiments.run +exp=racing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.models.shape import model_shape
from shadowattn.offline.importance import named_ablation, summarise
from shadowattn.offline.shared_ablations import measure_exactly
from shadowattn.offline.work import AblationWork, Progress, plan, shard
from shadowattn.types import AblationLosses, Importance

Allotment = Callable[[Importance], list[list[float]]]
"""What the allocator makes of an importance: retentions [L][H]."""


@dataclass(frozen=True)
class Race:
    """`first` windows in the first round; settled at `z` standard errors, `tolerance` of the mean retention and a share of
    `overlap` of the other heads within the interval. `seed` is that of the order in which windows are taken."""

    first: int = 48
    z: float = 3.0
    tolerance: float = 0.08
    overlap: float = 0.2
    seed: int = 0

    def __post_init__(self):
        if self.first < 2 or self.z <= 0 or self.tolerance < 0 or not 0 <= self.overlap <= 1:
            raise InputError(
                "importance.race: expected first ≥ 2, z > 0, tolerance ≥ 0 and overlap in [0, 1], got "
                f"{self.first}, {self.z}, {self.tolerance} and {self.overlap}"
            )

    def rounds(self, windows: int) -> list[slice]:
        """The windows of each round: `first`, half as many again, …"""
        ends = [min(self.first, windows)]
        while ends[-1] < windows:
            ends.append(min(ends[-1] + ends[-1] // 2, windows))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def order(self, windows: int) -> Tensor:
        """The order in which windows are taken, int64 [W]. They come in the text's: the first would speak for its beginning."""
        return torch.randperm(windows, generator=torch.Generator().manual_seed(self.seed))


def race_ablations(
    model: PreTrainedModel,
    windows: Tensor,
    units: Units,
    allot: Allotment,
    *,
    race: Race,
    ablation: str = "zero",
    batch: int = 8,
    linear: str = "auto",
    shard_index: int = 0,
    shard_count: int = 1,
    progress: Progress = iter,
) -> AblationLosses | None:
    """Losses of each ablation on the first windows, as many as it took to settle it; the unchanged model's on all.

    The windows are taken in a random order, and the losses come back in that order.

    Arguments as in `importance.measure_ablations`. A round needs the one before it whole: with several shards, None comes back
    at the end of the shard's share of a round that others have not finished. What is settled follows from the stored
    losses alone, so an interrupted race ends in the same numbers.
    """
    how, shape = named_ablation(ablation), model_shape(model)
    windows = windows[race.order(len(windows))]
    options = {"ablation": how, "batch": batch, "linear": linear}
    base = Units(units.folder / "base")
    measure_exactly(model, windows, base, [AblationWork(shape.layers, (), 1.0)], **options)
    plain = base.read(f"L{shape.layers}")
    work = [piece for piece in plan(shape, batch) if piece.layer < shape.layers]
    window_losses: dict[str, list[float]] = {key: [] for piece in work for key in piece.keys}
    for number, part in enumerate(race.rounds(len(windows))):
        if not work:
            break
        round_units = Units(units.folder / f"round{number}")
        mine = shard(work, shard_index, shard_count)
        measure_exactly(model, windows[part], round_units, mine, progress=progress, **options)
        if not all(round_units.has(key) for piece in work for key in piece.keys):
            return None
        for piece in work:
            for key in piece.keys:
                window_losses[key] += round_units.read(key)
        losses = _collect(window_losses, plain, shape.heads, ablation, windows.shape[1])
        work = _running(work, unsettled(losses, allot, race))
    return _collect(window_losses, plain, shape.heads, ablation, windows.shape[1])


def replay_race(losses: AblationLosses, allot: Allotment, *, race: Race) -> AblationLosses:
    """What `race_ablations` would have measured, given the losses of every ablation on every window."""
    order, heads = race.order(len(losses.base)).tolist(), len(losses.heads[0])
    named = {f"L{layer}": unit for layer, unit in enumerate(losses.layers)}
    named |= {f"L{i}_H{h}": unit for i, layer in enumerate(losses.heads) for h, unit in enumerate(layer)}
    complete = {name: [unit[window] for window in order] for name, unit in named.items()}
    plain = [losses.base[window] for window in order]
    window_losses, running = dict(complete), set(complete)
    for part in race.rounds(len(order)):
        window_losses |= {name: complete[name][: part.stop] for name in running}
        raced = _collect(window_losses, plain, heads, losses.ablation, losses.window_tokens)
        running &= unsettled(raced, allot, race)
        if not running:
            break
    return raced


def unsettled(losses: AblationLosses, allot: Allotment, race: Race) -> set[str]:
    """Names of the ablations that more windows may still change."""
    means = summarise(losses)
    before = _flat(allot(means))
    mean = sum(before) / len(before)
    base = torch.tensor(losses.base, dtype=torch.float64)
    wide = set()
    heads = {(i, h): head for i, layer in enumerate(losses.heads) for h, head in enumerate(layer)}
    centres = {place: _increase(base, head)[0] for place, head in heads.items()}

    def moves(shifted: Callable[[float], Importance], error: float) -> bool:
        """Whether `z` standard errors, either way, move any retention too far."""
        return any(_moves(before, allot(shifted(sign * race.z * error)), race.tolerance * mean) for sign in (-1, 1))

    for (layer, head), measured in heads.items():
        centre, error = _increase(base, measured)
        others = sum(abs(other - centre) <= race.z * error for other in centres.values()) - 1
        if others > race.overlap * (len(heads) - 1) or moves(partial(_with_head, means, layer, head), error):
            wide.add(f"L{layer}_H{head}")
    for layer, measured in enumerate(losses.layers):
        if moves(partial(_with_layer, means, layer), _increase(base, measured)[1]):
            wide.add(f"L{layer}")
    return wide


def _increase(base: Tensor, measured: tuple[float, ...]) -> tuple[float, float]:
    """Mean loss increase over the windows measured, and its standard error as an estimate of the mean over all windows."""
    increase = torch.tensor(measured, dtype=torch.float64) - base[: len(measured)]
    unmeasured = 1 - len(measured) / len(base)  # a sample without replacement
    return float(increase.mean()), float(increase.std() * (unmeasured / len(increase)) ** 0.5)


def _moves(before: list[float], after: list[list[float]], most: float) -> bool:
    return any(abs(new - old) > most for old, new in zip(before, _flat(after), strict=True))


def _with_head(means: Importance, layer: int, head: int, shift: float) -> Importance:
    """The importance with one head's loss moved."""
    row = list(means.head_ppl[layer])
    row[head] *= float(torch.tensor(shift, dtype=torch.float64).exp())
    return replace(means, head_ppl=(*means.head_ppl[:layer], tuple(row), *means.head_ppl[layer + 1 :]))


def _with_layer(means: Importance, layer: int, shift: float) -> Importance:
    changed = list(means.layer_ppl)
    changed[layer] *= float(torch.tensor(shift, dtype=torch.float64).exp())
    return replace(means, layer_ppl=tuple(changed))


def _running(work: list[AblationWork], names: set[str]) -> list[AblationWork]:
    """The pieces with only the ablations that still run."""
    running = []
    for piece in work:
        heads = tuple(head for head in piece.heads if f"L{piece.layer}_H{head}" in names)
        if heads or (not piece.heads and piece.keys[0] in names):
            share = len(heads) / len(piece.heads) if heads else 1.0
            running.append(AblationWork(piece.layer, heads, piece.cost * share))
    return running


def _collect(window_losses: dict[str, list[float]], plain: list[float], heads: int, ablation: str, tokens: int) -> AblationLosses:
    layers = len(window_losses) // (heads + 1)
    return AblationLosses(
        base=tuple(plain),
        layers=tuple(tuple(window_losses[f"L{layer}"]) for layer in range(layers)),
        heads=tuple(tuple(tuple(window_losses[f"L{i}_H{h}"]) for h in range(heads)) for i in range(layers)),
        ablation=ablation,
        window_tokens=tokens,
    )


def _flat(table: list[list[float]]) -> list[float]:
    return [value for row in table for value in row]
