"""What the paper measures on phones, simulated from a device's description; published values beside, unknown ones left out."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from rich.table import Table

from experiments import parameter_study, study
from experiments.progress import bar, say
from experiments.setup import Setup
from experiments.stages import Offline
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank
from shadowattn.online.simulation.description import load_device
from shadowattn.online.simulation.device import LAYERS, Device, Layer
from shadowattn.online.simulation.methods import METHODS, Cost, Method, known_methods, pooled, prompt_cost
from shadowattn.reporting import simulation_figures
from shadowattn.reporting.paper import FIG_10, TABLE_8
from shadowattn.reporting.rows import Row

FIGURES = ("fig10", "fig15", "table8", "scale", "parameters")
_LENGTHS = (1024, 2048, 4096)
# What the paper measures: the phones of Fig. 10 and of table 8, at one retention and chunk.
_PAPER_DEVICES = {"fig10": "snapdragon_8_gen_3", "table8": "snapdragon_8_gen_2"}
_PAPER_RETENTION, _PAPER_CHUNK_TOKENS = 0.2, 128
# Powers are fitted on these models' energies, the others' predicted.
_FITTED = ("PhoneLM-0.5B", "PhoneLM-1.5B")


@dataclass(frozen=True)
class SimulatedRow(Row):
    """A simulated row: of which device and core, for how many heads, and what the paper publishes (NaN: nothing)."""

    device: str = ""
    core: str = ""
    heads: int = 0
    published: float = math.nan


def measure(setup: Setup, offline: Offline, bank: GraphBank | None, folder: Path) -> list[SimulatedRow]:
    """Rows of one figure or table."""
    settings = setup.config.simulation
    if settings.figure not in FIGURES:
        raise InputError(f"simulation.figure: expected one of {', '.join(FIGURES)}, got {settings.figure!r}")
    device = load_device(settings.device)
    common = replace(
        study.common_row(setup, torch.zeros(0, 1)), path_kind="timing", measured="simulated", data="none", corpus_sha256="",
        estimate_device=device.estimate_on, retention=setup.config.retention, unit="ms", n=1, kernel="none",
    )  # fmt: skip
    if settings.figure == "parameters":
        asked = load_device(_PAPER_DEVICES["fig10"]), _PAPER_RETENTION
        if asked != (device, setup.config.retention):
            raise InputError(
                f"simulation.figure=parameters: expected the paper's phone {_PAPER_DEVICES['fig10']} at retention "
                f"{_PAPER_RETENTION}, to whose published values sets are fitted; got {device.name} at {setup.config.retention}"
            )
        return parameter_study.measure(setup, common, folder)
    say(f"{device.name}: {_knowledge(device)}")
    row = SimulatedRow(**asdict(common), device=device.name)
    return {"fig10": _fig10, "fig15": _fig15, "table8": _table8, "scale": _scale}[settings.figure](setup, device, row)


def _knowledge(device: Device) -> str:
    """How much of a description is of which kind."""
    kinds = [value.kind for value in vars(device).values() if hasattr(value, "kind")]
    return ", ".join(f"{kinds.count(kind)} numbers {kind}" for kind in dict.fromkeys(kinds))


def _cost(setup: Setup, device: Device, layer: Layer, method: Method, tokens: int) -> Cost:
    chunk_tokens = setup.config.simulation.chunk_tokens
    return prompt_cost(device, layer, method, tokens=tokens, chunk_tokens=chunk_tokens, retention=setup.config.retention)


def _is_papers(setup: Setup, device: Device) -> bool:
    """Whether the paper's device is simulated as the paper runs it, so that its values may stand beside."""
    asked = setup.config.retention, setup.config.simulation.chunk_tokens
    papers = load_device(_PAPER_DEVICES[setup.config.simulation.figure])
    return device == papers and asked == (_PAPER_RETENTION, _PAPER_CHUNK_TOKENS)


def _fig10(setup: Setup, device: Device, row: SimulatedRow) -> list[SimulatedRow]:
    rows, speedups, lossy = [], [], []
    for model, layer in bar(list(LAYERS.items()), "simulate"):
        for tokens in _LENGTHS:
            of = replace(row, model=model, context_tokens=tokens, heads=layer.heads, metric="latency")
            took = {name: _cost(setup, device, layer, method, tokens).total_us / 1e3 for name, method in METHODS.items()}
            rows += [replace(of, method=name, value=value) for name, value in took.items()]
            speedups.append(took["C/G-Full"] / took["ours"])
            lossy += [took[name] / took["ours"] for name in ("C/G-Sparse", "C/G-Block-Sparse", "NPU-Full")]
    found = {"mean_speedup": float(np.mean(speedups)), "largest_speedup": max(speedups), "largest_speedup_over_lossy": max(lossy)}
    of = replace(row, model="all", method="ours", unit="1")
    counts = dict.fromkeys(found, len(speedups)) | {"largest_speedup_over_lossy": len(lossy)}
    published = FIG_10 if _is_papers(setup, device) else {}
    for metric, value in found.items():
        # The mean is what the core's speed was fitted to: nothing is tested by it.
        flag = "fitted to this value" if published and metric == "mean_speedup" else ""
        paper = published.get(metric, math.nan)
        rows.append(replace(of, metric=metric, value=value, published=paper, flag=flag, n=counts[metric]))
    return rows


def _fig15(setup: Setup, device: Device, row: SimulatedRow) -> list[SimulatedRow]:
    if not device.core_speeds:
        raise InputError(f"simulation.device: {device.name} knows one kind of core; use snapdragon_8_gen_3")
    rows = []
    for core in bar(list(device.core_speeds), "simulate"):
        for model, layer in LAYERS.items():
            for name in ("C/G-Full", "ours"):
                cost = _cost(setup, device.on_core(core), layer, METHODS[name], 2048)
                of = replace(row, model=model, context_tokens=2048, core=core, heads=layer.heads)
                rows.append(replace(of, method=name, metric="latency", value=cost.total_us / 1e3))
    return rows


def _table8(setup: Setup, device: Device, row: SimulatedRow) -> list[SimulatedRow]:
    """Energy = core power × core time + NPU power × NPU time, at the powers of the paper's phone.

    How often the paper's kernel ran is unknown, so the powers are no watts; only ratios mean anything.
    """
    papers, is_papers = load_device(_PAPER_DEVICES["table8"]), _is_papers(setup, device)
    powers, rows = _fitted_powers(papers), []
    for model, layer in bar(list(LAYERS.items()), "simulate"):
        for name, method in METHODS.items():
            cost = _cost(setup, device, layer, method, 1024)
            of = replace(row, model=model, method=name, context_tokens=1024, unit="J", heads=layer.heads, metric="energy")
            of = replace(of, value=float(powers @ [cost.core_us, cost.estimate_us]))
            if is_papers:
                of = replace(of, published=TABLE_8[model][name], flag="fitted to this value" if model in _FITTED else "")
            elif device != papers:
                of = replace(of, flag=f"at the powers of {papers.name}")
            rows.append(of)
    return rows


def _fitted_powers(papers: Device) -> np.ndarray:
    """(core, NPU) powers in joules a microsecond: relative least squares of two models' published energies over all methods."""
    how = {"tokens": 1024, "chunk_tokens": _PAPER_CHUNK_TOKENS, "retention": _PAPER_RETENTION}
    costs = [prompt_cost(papers, LAYERS[model], method, **how) for model in _FITTED for method in METHODS.values()]
    joules = np.array([TABLE_8[model][name] for model in _FITTED for name in METHODS])
    times = np.array([[cost.core_us, cost.estimate_us] for cost in costs])
    return np.linalg.lstsq(times / joules[:, None], np.ones(len(joules)), rcond=None)[0]


def _scale(setup: Setup, device: Device, row: SimulatedRow) -> list[SimulatedRow]:
    """Qwen2-1.5B's layer against context; and a layer of head dimension 128 against heads, at 32 thousand tokens.

    Methods in floating point are left out where nothing is known of the device's.
    """
    methods = known_methods(device) | {"ours, 32-row blocks": pooled}
    cells = [(LAYERS["Qwen2-1.5B"], 4096 << step, "context") for step in range(9)]
    cells += [(Layer(heads, heads, 128), 32768, "heads") for heads in (4, 8, 16, 32, 64)]
    rows = []
    for layer, tokens, against in bar(cells, "simulate"):
        for name, method in methods.items():
            cost = _cost(setup, device, layer, method, tokens)
            of = replace(row, model="Qwen2-1.5B" if against == "context" else "D 128", method=name, data=against)
            of = replace(of, context_tokens=tokens, heads=layer.heads)
            rows.append(replace(of, metric="latency", value=cost.total_us / 1e3))
            rows.append(replace(of, metric="estimate_share", value=cost.estimate_us / cost.total_us, unit="1"))
            rows.append(replace(of, metric="core_share", value=cost.core_us / cost.total_us, unit="1"))
    return rows


def draw(setup: Setup, offline: Offline, rows: pd.DataFrame, folder: Path) -> None:
    """The figure of that name."""
    simulation_figures.DRAWN[setup.config.simulation.figure](rows, folder / f"{setup.config.experiment}.png")


def table(rows: pd.DataFrame, title: str) -> Table:
    """Simulated values, published ones beside where there are any."""
    if (rows.metric == "verdict").any():
        return parameter_study.table(rows, title)
    known = rows[rows.published.notna()]
    if len(known):
        made = Table("model", "method", "metric", "simulated", "published", "difference", "", title=f"{title} · simulated")
        for row in known.itertuples():
            texts = (f"{row.value:.3g}", f"{row.published:.3g}", f"{row.value / row.published - 1:+.0%}")
            made.add_row(row.model, row.method, row.metric.replace("_", " "), *texts, row.flag)
        return made
    costs = rows[rows.metric.isin(("latency", "energy"))]
    methods = costs.method.unique()
    heading = f"{title} · simulated {' '.join([costs.unit.iloc[0], *filter(None, costs.flag.unique())])}"
    made = Table("model", "tokens", "heads", "core", *methods, title=heading)
    for (model, tokens, heads, core), cell in costs.groupby(["model", "context_tokens", "heads", "core"], sort=False):
        values = cell.set_index("method").value
        made.add_row(model, str(tokens), str(heads), core, *(f"{values[name]:.4g}" for name in methods))
    return made
