"""W8A8 fake quantisation of the seven projections of every layer, as the artifact applies it before it measures importance.

Weights and biases: per tensor, absmax / 127, rounded, not clamped. Inputs and outputs of a projection: one static scale each,
from activations seen before. Where the largest is less than `clip_threshold` times the 99.9th percentile, it sets the scale, and
what is beyond is clamped; otherwise the percentile sets it and outliers pass unclamped, as they stay in float there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shadowattn.artifacts import read_json, write_json
from shadowattn.errors import InputError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CLIP_THRESHOLD = 64.0
_LEVELS = 127
_LEAST = 1e-5
_TOP_SHARE = 0.999
_REMEDY = "write one with shadowattn.offline.fake_quant.observe_activations"


@dataclass(frozen=True)
class ActivationRange:
    """Of one tensor's absolute values: the largest, and what all but one in a thousand stay below."""

    largest: float
    top: float

    def scale(self, clip_threshold: float) -> tuple[float, bool]:
        """The real value of one step, and whether values beyond the range are clamped."""
        clamps = self.top * clip_threshold > self.largest
        return max((self.largest if clamps else self.top) / _LEVELS, _LEAST), clamps


@dataclass(frozen=True)
class ProjectionRanges:
    input: ActivationRange
    output: ActivationRange


@contextmanager
def fake_quantised(
    model: PreTrainedModel, ranges: Mapping[str, ProjectionRanges], *, clip_threshold: float = CLIP_THRESHOLD
) -> Iterator[None]:
    """The model's projections in simulated W8A8; weights and projections are restored on leaving.

    Raises `InputError` where a projection has no range, or the model no such projections.
    """
    modules = _projections(model)
    missing = sorted(set(modules) - set(ranges))
    if missing:
        raise InputError(f"activation scales: expected one for {missing[0]} and {len(missing) - 1} more; {_REMEDY}")
    with ExitStack() as undo:
        for name, module in modules.items():
            quantised = _Quantised(module, ranges[name], clip_threshold)
            module.forward = quantised
            undo.callback(vars(module).pop, "forward")
        yield


class _Quantised:
    """The forward of one projection."""

    def __init__(self, module: nn.Linear, ranges: ProjectionRanges, clip_threshold: float):
        self.weight = _fake_weight(module.weight.detach())
        self.bias = None if module.bias is None else _fake_weight(module.bias.detach())
        step, self.clamp_input = ranges.input.scale(clip_threshold)
        self.input_step = max(round(step, 5), _LEAST)  # theirs is rounded to five decimals, of the input alone
        self.output_step, self.clamp_output = ranges.output.scale(clip_threshold)

    def __call__(self, x: Tensor) -> Tensor:
        x = _fake(x, self.input_step, self.clamp_input)
        return _fake(nn.functional.linear(x, self.weight, self.bias), self.output_step, self.clamp_output)


def observe_activations(model: PreTrainedModel, windows: Tensor, *, batch: int = 8) -> dict[str, ProjectionRanges]:
    """The ranges of every projection's input and output over windows [W, T], the percentile that of each batch, averaged."""
    modules = _projections(model)
    seen: dict[str, list[tuple[ActivationRange, ActivationRange]]] = {name: [] for name in modules}

    def watch(module, args, output, name: str) -> None:
        seen[name].append((_range(args[0]), _range(output)))

    with ExitStack() as undo, torch.no_grad():
        for name, module in modules.items():
            undo.callback(module.register_forward_hook(partial(watch, name=name)).remove)
        for ids in windows.to(model.device).split(batch):
            model(input_ids=ids, use_cache=False)
    return {name: ProjectionRanges(*(_merged(side) for side in zip(*pairs, strict=True))) for name, pairs in seen.items()}


def save_activation_scales(ranges: Mapping[str, ProjectionRanges], path: Path) -> None:
    """Writes the JSON that `load_activation_scales` reads: `ori` (largest) and `top_0_1` by projection and side."""
    sides = {name: asdict(value) for name, value in ranges.items()}
    content = {
        "ori": {name: {side: at["largest"] for side, at in both.items()} for name, both in sides.items()},
        "top_0_1": {name: {side: at["top"] for side, at in both.items()} for name, both in sides.items()},
        "all_stat": {},
    }
    write_json(Path(path), content)


def load_activation_scales(path: Path) -> dict[str, ProjectionRanges]:
    """Ranges from a JSON with the keys `ori` and `top_0_1`, each projection's name → {input, output}.

    The artifact's file has these keys; how it nests them could not be verified here. Raises `InputError` on anything else.
    """
    content = read_json(Path(path), _REMEDY)
    try:
        return {
            name: ProjectionRanges(*(_checked(path, top[side], content["ori"][name][side]) for side in ("input", "output")))
            for name, top in content["top_0_1"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: expected ori and top_0_1, each projection → input and output ({error!r}); {_REMEDY}"
        ) from error


def _checked(path: Path, top: float, largest: float) -> ActivationRange:
    if not 0 <= float(top) <= float(largest) < math.inf:
        raise InputError(f"{path}: expected 0 ≤ top_0_1 ≤ ori, finite, got {top} and {largest}; {_REMEDY}")
    return ActivationRange(float(largest), float(top))


def _projections(model: PreTrainedModel) -> dict[str, nn.Linear]:
    projections = {
        name: module
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in PROJECTIONS and isinstance(module, nn.Linear)
    }
    if not projections:
        raise InputError(f"{type(model).__name__}: expected projections called {', '.join(PROJECTIONS)}, found none")
    return projections


def _fake_weight(tensor: Tensor) -> Tensor:
    step = max(float(tensor.abs().max()) / _LEVELS, _LEAST)
    return ((tensor.float() / step).round() * step).to(tensor.dtype)


def _fake(x: Tensor, step: float, clamps: bool) -> Tensor:
    levels = (x.float() / step).round()
    if clamps:
        levels = levels.clamp(-_LEVELS - 1, _LEVELS)
    return (levels * step).to(x.dtype)


def _range(x: Tensor) -> ActivationRange:
    values = x.detach().float().abs().flatten()
    rank = max(1, math.ceil(_TOP_SHARE * len(values)))
    return ActivationRange(float(values.max()), float(values.kthvalue(rank).values))


def _merged(parts: tuple[ActivationRange, ...]) -> ActivationRange:
    return ActivationRange(max(part.largest for part in parts), sum(part.top for part in parts) / len(parts))
