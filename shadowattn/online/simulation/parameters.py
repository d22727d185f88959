"""Descriptions of the paper's phone that agree with what is published of it: drawn, and kept where rounded values come out.

One description fits the published values; so do many others. A statement about the phone that only some of them support does
not follow from what is published.
"""

import random
from dataclasses import asdict, dataclass, fields
from functools import cache

import numpy as np
from scipy.optimize import brentq

from shadowattn.online.simulation.device import LAYERS, ChunkShape, Device, Layer, Number
from shadowattn.online.simulation.methods import METHODS, Cost, Method

# Milliseconds of a launch by heads (section 3.4: Q 128 × 64, K 2048 × 64), whole milliseconds as published.
LAUNCH_MS = {1: 2, 2: 3, 4: 4}
_LAUNCH_PRODUCTS = 128 * 2048 * 64
# Fig. 4a at a retention of 0.2: latency saved over dense attention, and the share of what is left that is estimation; in 0.1 %.
FIG_4A_SAVED, FIG_4A_ESTIMATION, FIG_4A_RETENTION = 0.343, 0.667, 0.2
# Mean of Fig. 10 over four models and three lengths, times faster than C/G-Full; in tenths.
MEAN_SPEEDUP = 3.5
LENGTHS = (1024, 2048, 4096)
# What no published value settles: assumed to lie anywhere in here, evenly.
RANGES = {
    "launch_us": (0.0, 3000.0),
    "head_us": (0.0, 2000.0),
    "score_share": (0.2, 0.438),
    "half_precision": (0.5, 1.0),
    "select_us": (0.0, 100.0),
    "attend_us": (0.0, 100.0),
    "wakeup_latency_us": (0.0, 100.0),
    "task_overhead_us": (0.0, 50.0),
    "bandwidth_gb_s": (20.0, 76.8),
    "small_core": (0.2, 0.6),
    "prime_core": (1.4, 3.0),
}
CHOICES = {"figure_dim": (64, 128, 160), "chunk_tokens": (128, 256, 512)}
# One core's nanoseconds for a pair and dimension of dense attention: where a mean speed-up is looked for.
_DENSE_NS = (0.02, 5.0)
_KNOTS = (128, 512, 1024, 2048)


@dataclass(frozen=True)
class Parameters:
    """One draw. `head_us` is a head's part of the published launch beside the fixed `launch_us`.

    `estimation` (scores and selection) and `overhead` (a kept key's cost) are in units of dense attention, as Fig. 4a has them
    for heads of `figure_dim`; `score_share` is the scores' part of the first. `half_precision` is what half precision leaves of
    the cost of sparse attention. The fixed parts, `bandwidth_gb_s` and the speeds of the other cores are as in `Device`. A prompt
    goes through in chunks of `chunk_tokens`.
    """

    launch_us: float
    head_us: float
    estimation: float
    overhead: float
    score_share: float
    half_precision: float
    select_us: float
    attend_us: float
    wakeup_latency_us: float
    task_overhead_us: float
    bandwidth_gb_s: float
    small_core: float
    prime_core: float
    figure_dim: int
    chunk_tokens: int
    mean_speedup: float

    def device(self, dense_ns: float) -> Device:
        """The phone by these parameters, with a middle core of that speed."""
        numbers = {
            "cores": 1.0,
            "launch_us": self.launch_us,
            "estimate_ns": 1e3 * self.head_us / _LAUNCH_PRODUCTS,
            "select_us": self.select_us,
            "select_ns": (self.estimation - self.score_share) * self.figure_dim * dense_ns,
            "attend_us": self.attend_us,
            "attend_ns": self.overhead * self.half_precision * dense_ns,
            "dense_ns": dense_ns,
            "score_ns": self.score_share * dense_ns,
            "bandwidth_gb_s": self.bandwidth_gb_s,
            "wakeup_latency_us": self.wakeup_latency_us,
            "task_overhead_us": self.task_overhead_us,
        }
        speeds = {"small": self.small_core, "middle": 1.0, "prime": self.prime_core}
        constants = {name: Number(value, "assumed", "a drawn parameter set") for name, value in numbers.items()}
        cores = {kind: Number(value, "assumed", "a drawn parameter set") for kind, value in speeds.items()}
        return Device(name="Snapdragon 8 Gen 3, drawn", estimate_on="NPU", core_speeds=cores, **constants)


@dataclass(frozen=True)
class Fitting:
    """A parameter set with which all published values that anything is fitted to come out, and the core speed that does it."""

    parameters: Parameters
    device: Device


def fits_launches(launch_us: float, head_us: float) -> bool:
    """Whether launches of 1, 2 and 4 heads round to the published milliseconds."""
    return all(-500 <= launch_us + heads * head_us - 1e3 * ms < 500 for heads, ms in LAUNCH_MS.items())


def draw_parameters(draw: random.Random) -> Parameters:
    """A set that reproduces the launches and Fig. 4a, not yet Fig. 10."""
    drawn = {name: draw.uniform(*limits) for name, limits in RANGES.items()}
    while not fits_launches(drawn["launch_us"], drawn["head_us"]):
        drawn |= {name: draw.uniform(*RANGES[name]) for name in ("launch_us", "head_us")}
    left = 1 - draw.uniform(FIG_4A_SAVED - 5e-4, FIG_4A_SAVED + 5e-4)
    estimation = left * draw.uniform(FIG_4A_ESTIMATION - 5e-4, FIG_4A_ESTIMATION + 5e-4)
    drawn["score_share"] = min(drawn["score_share"], estimation)
    return Parameters(
        **drawn,
        estimation=estimation,
        overhead=(left - estimation) / FIG_4A_RETENTION,
        **{name: draw.choice(choices) for name, choices in CHOICES.items()},
        mean_speedup=draw.uniform(MEAN_SPEEDUP - 0.05, MEAN_SPEEDUP + 0.05),
    )


def fit_core(parameters: Parameters) -> Fitting | None:
    """The set with the core's speed that gives its mean speed-up over Fig. 10; None where no speed does.

    The slower the core, the more ours gains, until the core is all that both wait for.
    """

    @cache
    def excess(log_ns: float) -> float:
        device = parameters.device(float(np.exp(log_ns)))
        return float(np.mean(speedups(device, parameters.chunk_tokens))) - parameters.mean_speedup

    low, high = (float(np.log(end)) for end in _DENSE_NS)
    if excess(high) < 0 or excess(low) > 0:
        return None
    log_ns = brentq(excess, low, high, xtol=2e-3)
    return Fitting(parameters, parameters.device(float(np.exp(log_ns))))


def speedups(device: Device, chunk_tokens: int, method: str = "C/G-Full") -> np.ndarray:
    """Times that ours is faster than `method`, by model and length of Fig. 10."""
    return np.concatenate(
        [prompt_totals(device, layer, METHODS[method], chunk_tokens) / prompt_totals(device, layer, METHODS["ours"], chunk_tokens)
         for layer in LAYERS.values()]
    )  # fmt: skip


def prompt_totals(device: Device, layer: Layer, method: Method, chunk_tokens: int) -> np.ndarray:
    """Microseconds of a prompt of each of `LENGTHS`."""
    return np.array([cost.total_us for cost in prompt_costs(device, layer, method, LENGTHS, chunk_tokens)])


def prompt_costs(
    device: Device, layer: Layer, method: Method, lengths: tuple[int, ...], chunk_tokens: int, retention: float = FIG_4A_RETENTION
) -> list[Cost]:
    """Costs of prompts of several lengths, multiples of a chunk: linear in keys between a few chunks that are simulated."""
    ends = np.arange(chunk_tokens, max(lengths) + 1, chunk_tokens)
    knots = sorted({keys for keys in _KNOTS if chunk_tokens <= keys <= ends[-1]} | {int(ends[-1])})
    at_knots = [method(device, layer, ChunkShape(chunk_tokens, keys), retention) for keys in knots]
    running = {
        field.name: np.cumsum(np.interp(ends, knots, [getattr(cost, field.name) for cost in at_knots])) for field in fields(Cost)
    }
    return [Cost(**{name: float(total[length // chunk_tokens - 1]) for name, total in running.items()}) for length in lengths]


def values(fitting: Fitting) -> dict[str, float]:
    """All parameters of a set by name, the fitted core's speed among them."""
    return {name: float(value) for name, value in asdict(fitting.parameters).items()} | {
        "dense_ns": fitting.device.dense_ns.value
    }
