"""Which statements about the paper's phone follow from what is published: their share of all parameter sets that fit."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from experiments.lab import Lab
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.online.simulation import parameters, ttft
from shadowattn.online.simulation.description import load_device
from shadowattn.online.simulation.device import LAYERS
from shadowattn.online.simulation.methods import METHODS, pooled
from shadowattn.online.simulation.parameters import LENGTHS, Fitting, prompt_costs
from shadowattn.reporting.figures.parameters import draw as draw_parameters
from shadowattn.reporting.paper import FIG_4A, FIG_10, MLLM_TTFT, TABLE_8
from shadowattn.reporting.rows import Row

_FITTED_MODELS = ("PhoneLM-0.5B", "PhoneLM-1.5B")
_LONGEST = 1 << 20  # the million tokens that `VERDICTS` name
_FITTED, _HELD_OUT = "fitted to", "held out"

Outcome = dict[str, float]
# Statement, and whether it holds for a set.
VERDICTS: dict[str, Callable[[Outcome], bool]] = {
    "ours is faster than C/G-Full in all 12 cases": lambda o: o["smallest_speedup"] > 1,
    "ours is faster than C/G-Full on every core": lambda o: o["smallest_speedup_of_cores"] > 1,
    "block-sparse is faster than ours in all 12 cases": lambda o: o["block_sparse_faster"] == 12,
    "block-sparse is faster than ours in 10 or more cases": lambda o: o["block_sparse_faster"] >= 10,
    "block-sparse takes more energy than ours in all 4 models": lambda o: o["least_block_sparse_energy"] > 1,
    "the largest speed-up rounds to the published 6.9": lambda o: 6.85 <= o["largest_speedup"] < 6.95,
    "the largest speed-up over lossy methods rounds to 4.0": lambda o: 3.95 <= o["largest_speedup_over_lossy"] < 4.05,
    "the estimate is busier than the core in all 12 cases": lambda o: o["estimate_bound"] == 12,
    "the estimate is busier than the core at a million tokens": lambda o: o["estimate_over_core_longest"] > 1,
    "32-row lists are faster than ours at 4 thousand tokens": lambda o: o["shared_speedup_4096"] > 1,
    "32-row lists are faster than ours at a million tokens": lambda o: o["shared_speedup_longest"] > 1,
    "mllm's dense runs take longer than simulated in all 9 cases": lambda o: all(
        o[f"dense {model} {tokens}"] < dense for (model, tokens), (dense, _, _) in MLLM_TTFT.items()
    ),
}
# Quantities beside which something is published, and whether anything was fitted to it.
PUBLISHED = {
    "mean_speedup": (FIG_10["mean_speedup"], _FITTED),
    "saved_0.2": (FIG_4A[0.2], _FITTED),
    "saved_0.3": (FIG_4A[0.3], _HELD_OUT),
    "saved_0.4": (FIG_4A[0.4], _HELD_OUT),
    "largest_speedup": (FIG_10["largest_speedup"], _HELD_OUT),
    "largest_speedup_over_lossy": (FIG_10["largest_speedup_over_lossy"], _HELD_OUT),
} | {
    f"energy_saved {model}": (TABLE_8[model]["C/G-Full"] / TABLE_8[model]["ours"], _HELD_OUT) for model in LAYERS
}  # fmt: skip


@dataclass(frozen=True)
class ParameterRow(Row):
    """A row about all fitting sets, or about one of them (`number`).

    `low` and `high` are the 5 and 95 % quantiles over sets, or the limits of a range; elsewhere the value itself.
    """

    device: str = ""
    published: float = math.nan
    low: float = 0.0
    high: float = 0.0
    number: int = -1


@dataclass(frozen=True)
class Parameters(Study):
    """`draws` parameter sets of the paper's phone at the paper's retention, drawn from the ranges that the published, rounded
    values leave. Energies of `fitted_models` fit the powers of table 8, those of the others are predicted."""

    draws: int = 300
    fitted_models: list[str] = field(default_factory=lambda: ["PhoneLM-0.5B", "PhoneLM-1.5B"])
    needs: ClassVar[tuple[str, ...]] = ("seed",)
    headline: ClassVar[tuple[str, ...]] = ("block_sparse_faster", "ttft_ratio")

    def __post_init__(self):
        check_count("study.draws", self.draws)
        unknown = [name for name in self.fitted_models if name not in LAYERS]
        if unknown or not 0 < len(set(self.fitted_models)) < len(LAYERS):
            raise InputError(f"study.fitted_models: expected some of {', '.join(LAYERS)}, not all, got {self.fitted_models}")

    def measure(self, lab: Lab) -> list[ParameterRow]:
        """Rows of every verdict, quantity and parameter over all sets that fit, and of each set what the figure draws."""
        units, seed = lab.units("cells"), lab.seed
        say(f"parameters: {self.draws} sets that reproduce the launches and Fig. 4a, each with the core that reproduces Fig. 10")
        drawn = [
            units.get(str(number), partial(_outcome, seed, number, self.fitted_models))
            for number in bar(range(self.draws), "simulate")
        ]
        outcomes = [one["outcome"] for one in drawn if one["outcome"] is not None]
        if not outcomes:
            raise InputError(f"parameters: expected sets that reproduce what is published, got none of {self.draws}")
        papers = load_device("snapdragon_8_gen_3")
        row = replace(
            lab.row(ParameterRow), device=f"{papers.name}, drawn", n=len(outcomes), path_kind="timing", measured="simulated",
            estimate_device=papers.estimate_on, retention=0.2,
        )  # fmt: skip
        rows = [_with(row, metric="fitting_sets", value=float(len(outcomes)), n=self.draws)]
        for name, holds in VERDICTS.items():
            rows.append(_with(row, metric="verdict", method=name, value=sum(map(holds, outcomes)) / len(outcomes)))
        for name in outcomes[0]:
            values = [one[name] for one in outcomes]
            low, median, high = np.percentile(values, (5, 50, 95))
            published, role = PUBLISHED.get(name, (math.nan, ""))
            rows.append(
                replace(row, metric="quantity", method=name, value=median, low=low, high=high, published=published, flag=role)
            )
        for (model, tokens), (dense, sparse, _) in MLLM_TTFT.items():
            for part, value in (("dense", dense), ("sparse", sparse), ("ratio", dense / sparse)):
                name = f"{part} {model} {tokens}"
                at = next(index for index, one in enumerate(rows) if one.method == name)
                where = {
                    "model": model,
                    "context_tokens": tokens,
                    "metric": f"ttft_{part}",
                    "unit": "1" if part == "ratio" else "ms",
                }
                rows[at] = replace(rows[at], published=value, flag=_HELD_OUT, **where)
        for count in range(13):
            share = sum(one["block_sparse_faster"] == count for one in outcomes) / len(outcomes)
            rows.append(_with(row, metric="block_sparse_faster", method=str(count), value=share))
        for name, (low, high) in (parameters.RANGES | ttft.RANGES).items():
            rows.append(replace(row, metric="range", method=name, value=(low + high) / 2, low=low, high=high))
        for number, one in enumerate(outcomes):
            for name in ("launch_us", "largest_speedup", "chunk_tokens"):
                rows.append(_with(row, metric="set", method=name, value=one[name], number=number, n=1))
        return rows

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"study_parameters": draw_parameters(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """Shares of the sets for which a statement holds; and medians and 5 to 95 % of what is published."""
        sets = rows[rows.metric == "fitting_sets"].iloc[0]
        table = Table("simulated", "value", "5 … 95 %", "published", "", title=f"{title} · {sets.value:.0f} of {sets.n} sets fit")
        for row in rows[rows.metric == "verdict"].itertuples():
            table.add_row(row.method, f"{row.value:.1%} of {row.n} sets", "", "", "")
        for row in rows[rows.published.notna()].itertuples():
            values = f"{row.value:.3g}", f"{row.low:.3g} … {row.high:.3g}", f"{row.published:.3g}"
            table.add_row(f"{row.metric} {row.method}".replace("quantity ", "").replace("_", " "), *values, row.flag)
        return table


def _with(row: ParameterRow, **changes) -> ParameterRow:
    return replace(row, low=changes["value"], high=changes["value"], **changes)


def _outcome(seed: int, number: int, fitted_models: Sequence[str]) -> dict[str, Outcome | None]:
    """What a set says, None where it does not fit; each has a random stream of its own."""
    draw = random.Random(f"{seed} {number}")
    fitting = parameters.fit_core(parameters.draw_parameters(draw))
    beside = {name: draw.uniform(*limits) for name, limits in ttft.RANGES.items()}
    return {"outcome": None if fitting is None else outcome(fitting, beside, fitted_models)}


def outcome(fitting: Fitting, beside: dict[str, float], fitted_models: Sequence[str] = _FITTED_MODELS) -> Outcome:
    """Parameters and everything that is said of them; `beside` is what `ttft.RANGES` draws."""
    device, chunk_tokens, drawn = fitting.device, fitting.parameters.chunk_tokens, fitting.parameters
    costs = {
        (model, name): prompt_costs(device, layer, method, LENGTHS, chunk_tokens)
        for model, layer in LAYERS.items()
        for name, method in METHODS.items()
    }
    ours = np.array([cost.total_us for model in LAYERS for cost in costs[model, "ours"]])
    gains = {
        name: np.array([cost.total_us for model in LAYERS for cost in costs[model, name]]) / ours
        for name in METHODS
        if name != "ours"
    }
    quantities = parameters.values(fitting) | beside
    quantities |= {f"saved_{kept}": 1 - drawn.estimation - kept * drawn.overhead for kept in FIG_4A}
    quantities |= {
        "fitted_mean_speedup": quantities["mean_speedup"],
        "mean_speedup": float(gains["C/G-Full"].mean()),
        "largest_speedup": float(gains["C/G-Full"].max()),
        "smallest_speedup": float(gains["C/G-Full"].min()),
        "largest_speedup_over_lossy": max(float(gains[name].max()) for name in gains if name != "C/G-Full"),
        "block_sparse_faster": float((gains["C/G-Block-Sparse"] < 1).sum()),
        "least_block_sparse_time": float(gains["C/G-Block-Sparse"].min()),
        "largest_block_sparse_time": float(gains["C/G-Block-Sparse"].max()),
        "estimate_bound": float(sum(c.estimate_us > c.core_us for model in LAYERS for c in costs[model, "ours"])),
    }
    quantities["smallest_speedup_of_cores"] = min(
        float(parameters.speedups(device.on_core(core), chunk_tokens).min()) for core in device.core_speeds
    )
    return quantities | _energies(costs, fitted_models) | _long(fitting) | _ttft(fitting, beside)


def _energies(costs: dict, fitted_models: Sequence[str]) -> Outcome:
    """Table 8 at 1024 tokens: powers fitted on the energies of some models, those of the others predicted."""
    held_out = [model for model in LAYERS if model not in fitted_models]
    times = {key: np.array([layer_costs[0].core_us, layer_costs[0].estimate_us]) for key, layer_costs in costs.items()}
    joules = {(model, name): TABLE_8[model][name] for model, name in costs}
    fitted = [key for key in costs if key[0] in fitted_models]
    relative = np.array([times[key] / joules[key] for key in fitted])
    powers = np.linalg.lstsq(relative, np.ones(len(fitted)), rcond=None)[0]
    energy = {key: float(powers @ unit_times) for key, unit_times in times.items()}
    errors = [abs(energy[key] / joules[key] - 1) for key in costs if key[0] in held_out]
    least = min(energy[model, "C/G-Block-Sparse"] / energy[model, "ours"] for model in LAYERS)
    saved = {f"energy_saved {model}": energy[model, "C/G-Full"] / energy[model, "ours"] for model in held_out}
    return saved | {
        "median_energy_error": float(np.median(errors)), "worst_energy_error": max(errors), "least_block_sparse_energy": least,
    }  # fmt: skip


def _long(fitting: Fitting) -> Outcome:
    """Qwen2-1.5B's layer at 4 thousand and at a million tokens."""
    layer, methods = LAYERS["Qwen2-1.5B"], {"full": METHODS["C/G-Full"], "ours": METHODS["ours"], "shared": pooled}
    costs = {
        name: prompt_costs(fitting.device, layer, method, (4096, _LONGEST), fitting.parameters.chunk_tokens)
        for name, method in methods.items()
    }
    quantities = {}
    for at, length in enumerate(("4096", "longest")):
        full, ours, shared = (costs[name][at] for name in methods)
        quantities |= {
            f"speedup_{length}": full.total_us / ours.total_us,
            f"shared_speedup_{length}": ours.total_us / shared.total_us,
        }
        quantities[f"estimate_over_core_{length}"] = ours.estimate_us / ours.core_us
    return quantities


def _ttft(fitting: Fitting, beside: dict[str, float]) -> Outcome:
    """Milliseconds, and their ratio, of mllm's nine prompts."""
    quantities = {}
    for (model, tokens), (_, _, retention) in MLLM_TTFT.items():
        dense, sparse = ttft.ttft_us(fitting.device, ttft.MODELS[model], tokens, retention, **beside)
        quantities |= {f"dense {model} {tokens}": dense / 1e3, f"sparse {model} {tokens}": sparse / 1e3}
        quantities[f"ratio {model} {tokens}"] = dense / sparse
    return quantities
