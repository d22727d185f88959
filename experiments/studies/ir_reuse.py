"""How a decoder becomes graphs for an NPU, and what each way costs: compiling, memory, cached loads, and a step.

A form is compiled in a process of its own; then the whole graph is compiled beside it, and both take turns on the same step.
Four forms are of the layers alone, as `graphs.decoder.layers` builds them. The others are of the graph that transformers' model
is converted to, embedding and output layer included: as NPUW cuts it, whole (`converted`), whole for any number of tokens
(`dynamic`), and with earlier keys and values as its state, in any number (`stateful`). NPUW's LLM mode takes the last of these
and makes static graphs of its own of it, for prompts and for decoding; it is compared with that graph as it stands, on the same
whole prompt and on the tokens behind one.
"""

import gc
import math
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.lab import Lab
from experiments.own_process import check_memory, in_own_process, resident_bytes
from experiments.progress import bar, say
from experiments.refusals import check_choice, check_count
from experiments.studies.base import Study
from experiments.studies.ir_forms import BUILDERS, OF_PROMPTS, RESPONSE, Parts, Step, base_of, trace
from shadowattn.errors import InputError
from shadowattn.interleave import interleave, repeated
from shadowattn.models.known import KNOWN_MODELS
from shadowattn.reporting.figures.ir_reuse import draw as draw_ir_reuse
from shadowattn.reporting.rows import SpreadRow

FORMS = tuple(BUILDERS)
PHASES = ("decode", "prefill")
_LEAST_OF_PROMPTS = 6  # layers that NPUW's LLM mode was seen to run
_TOLERANCE = 2e-3  # of the largest value; other orders of summation
_LEGEND = (
    "graphs: compiled bodies; calls: of them in a step; outputs: tensors that leave a call, in a step\n"
    "copies: what copying the outputs once takes, by one thread, times the step; whether a form copies them is not known\n"
    "compile, cached: seconds without and with what an earlier compilation left (OpenVINO's cache; of NPUW its plan, and of its\n"
    "  LLM mode what is compiled)\n"
    "memory: held after compiling; step: times that of the whole graph, `converted` for NPUW, both taking turns\n"
    "NPUW LLM: compiled are the graphs of both phases and the output layer; counted is the phase's, of a prefill one chunk;\n"
    "  a step of prefill is a whole prompt, beside `stateful` on the same one; in rows first_step_s is the first decoding step\n"
    "  behind a prompt, which takes its keys and values from the prompt's graph"
)


@dataclass(frozen=True)
class ReuseRow(SpreadRow):
    """A row about one form of a decoder of `layers` layers, in one `phase`; `plan`: how NPUW grouped it."""

    layers: int = 0
    phase: str = ""
    plan: str = ""
    threads: int = 0


@dataclass
class Measured:
    """What a form took; `seconds` of the form and of the whole graph by turns."""

    graphs: int
    calls: int
    outputs: int
    handed_bytes: float  # of the outputs; not a number where their shapes are not known
    plan: str
    compile_s: float
    cached_s: float
    held_bytes: int
    seconds: list[float]
    whole_seconds: list[float]
    copy_seconds: list[float] = field(default_factory=list)  # of as many bytes as are handed on
    first_seconds: list[float] = field(default_factory=list)  # empty where no prompt comes before a step
    whole_first_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class IrReuse(Study):
    """Every one of `forms` with each number of `layers` of `shape`, in decoding and in a prefill chunk of `chunk_tokens`.

    Steps go behind `past` tokens, for `rounds` rounds. `hidden`: another width than the shape's own.
    """

    forms: list[str] = field(default_factory=lambda: list(FORMS))
    layers: list[int] = field(default_factory=lambda: [6, 12, 24])
    shape: str = "qwen2_0_5b"
    hidden: int | None = None
    chunk_tokens: int = 128
    past: int = 1024
    rounds: int = 7
    needs: ClassVar[tuple[str, ...]] = ("threads",)
    headline: ClassVar[tuple[str, ...]] = ("compile_s", "step_times_whole")

    def __post_init__(self):
        check_choice("study.shape", self.shape, tuple(KNOWN_MODELS))
        for name in ("forms", "layers"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise InputError(f"study.{name}: expected one or more, each once, got {values}")
        for form in self.forms:
            check_choice("study.forms", form, FORMS)
        check_count("study.layers", min(self.layers), least=2)
        for name in ("chunk_tokens", "past", "rounds"):
            check_count(f"study.{name}", getattr(self, name))
        if asked := set(OF_PROMPTS) & set(self.forms):
            if min(self.layers) < _LEAST_OF_PROMPTS:
                raise InputError(
                    f"study.layers: expected at least {_LEAST_OF_PROMPTS} for {', '.join(sorted(asked))}, since NPUW's LLM mode "
                    f"fails on a decoder of 4, got {min(self.layers)}; use more layers, or leave those out of study.forms"
                )
            if self.chunk_tokens & (self.chunk_tokens - 1):
                raise InputError(
                    f"study.chunk_tokens: expected a power of two, which NPUW's LLM mode needs, got {self.chunk_tokens}"
                )
            if self.rounds > RESPONSE - 2:  # one step before the rounds, and one that warms up
                most = RESPONSE - 2
                raise InputError(
                    f"study.rounds: expected at most {most}, the tokens that NPUW's LLM mode decodes, got {self.rounds}"
                )

    def check(self, lab: Lab) -> None:
        check_memory("this study measures it; run it on Linux")

    def measure(self, lab: Lab) -> list[ReuseRow]:
        units, rows = lab.units("cells"), []
        row = replace(lab.timing_row(ReuseRow), model=f"random-{self.shape}", context_tokens=self.past, n=self.rounds)
        row = replace(row, threads=torch.get_num_threads())
        cells = [(phase, layers, form) for phase in PHASES for layers in self.layers for form in self.forms]
        say(f"graphs: {len(self.forms)} forms of {self.shape}, {', '.join(map(str, self.layers))} layers, {len(cells)} cells")
        for phase, layers, form in bar(cells, "forms"):
            step = Step(self.shape, layers, self.hidden, phase, self.chunk_tokens, self.past)
            cell = partial(in_own_process, measure_form, form, step, self.rounds)
            measured = Measured(**units.get(f"{phase}-{layers}-{form}", lambda cell=cell: asdict(cell())))
            read = step.prompt if phase == "prefill" and form in OF_PROMPTS else step.rows
            rows += _rows(replace(row, method=form, layers=layers, phase=phase, plan=measured.plan, chunk_rows=read), measured)
        return rows

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"ir_reuse": draw_ir_reuse(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A line a phase and form, of the most layers."""
        most = rows[rows.layers == rows.layers.max()]
        values = most.pivot_table(index=["phase", "method"], columns="metric", values="value", sort=False)
        plans = most.drop_duplicates(["phase", "method"]).set_index(["phase", "method"]).plan.fillna("")
        table = Table(title=f"{title} · {int(most.layers.iloc[0])} layers", title_justify="left")
        headings = ["phase", "form", "groups", "graphs", "calls", "outputs", "copies", "compile, s", "cached, s", "memory, MB"]
        for heading in (*headings, "step"):
            table.add_column(heading, justify="left" if heading in ("phase", "form", "groups") else "right")
        for (phase, form), at in values.iterrows():
            counts = (f"{at[name]:.0f}" for name in ("graphs", "calls", "outputs"))
            cached = f"{at.cached_s:.2f}" if at.get("cached_s", float("nan")) > 0 else "–"
            times = f"{at.compile_s:.2f}", cached, f"{at.held_bytes / 1e6:.0f}", f"{at.step_times_whole:.2f}"
            copies = f"{at.copies_times_step:.3f}" if at.get("copies_times_step", float("nan")) >= 0 else "–"
            table.add_row(phase, form, plans[phase, form], *counts, copies, *times)
        return Group(table, _LEGEND)


def _rows(row: ReuseRow, measured: Measured) -> list[ReuseRow]:
    once = {"graphs": "1", "calls": "1", "outputs": "1", "handed_bytes": "bytes"}
    once |= {"compile_s": "s", "cached_s": "s", "held_bytes": "bytes"}
    rows = []
    for metric, unit in once.items():
        value = float(getattr(measured, metric))
        if value != value:
            continue
        rows.append(replace(row, metric=metric, unit=unit, n=1, value=value, low=value, high=value))
    ratios = np.divide(measured.seconds, measured.whole_seconds)
    spread = [("step_s", "s", measured.seconds), ("step_times_whole", "1", ratios)]
    spread += [("call_s", "s", np.divide(measured.seconds, measured.calls))]
    if measured.copy_seconds:
        copies = np.divide(measured.copy_seconds, measured.seconds)
        spread += [("copies_s", "s", measured.copy_seconds), ("copies_times_step", "1", copies)]
    if measured.first_seconds:
        first = np.divide(measured.first_seconds, measured.whole_first_seconds)
        spread += [("first_step_s", "s", measured.first_seconds), ("first_step_times_whole", "1", first)]
    for metric, unit, values in spread:
        low, median, high = (float(x) for x in np.percentile(values, (25, 50, 75)))
        rows.append(replace(row, metric=metric, unit=unit, value=median, low=low, high=high))
    return rows


def measure_form(form: str, step: Step, rounds: int) -> Measured:
    """Compiles the form, then the whole graph, and lets both take turns. Raises `RuntimeError` where they disagree."""
    parts = Parts.of(step)
    trace(form, parts)  # which is no part of compiling
    with tempfile.TemporaryDirectory() as folder:
        before, start = resident_bytes(), time.perf_counter()
        run, counts = BUILDERS[form](parts, Path(folder))
        compile_s = time.perf_counter() - start
        found = run()  # what is allocated at the first step is the form's too
        held = resident_bytes() - before
        whole = base_of(form, parts)
        _check_same(form, found, whole(), "the whole graph's")
        turns, before = {"form": run.call, "whole": whole.call}, {"form": run.before, "whole": whole.before}
        times = interleave(turns, rounds=rounds, warmup=1, before=before)
        seconds, whole_seconds = ([float(x) for x in times[name].seconds] for name in ("form", "whole"))
        firsts = [(run.first(), whole.first()) for _ in range(rounds if run.first else 0)]
        del run, whole, turns, before  # what is compiled again would otherwise be held beside them
        gc.collect()
        start = time.perf_counter()
        again, _ = BUILDERS[form](parts, Path(folder))
        cached_s = time.perf_counter() - start
        _check_same(form, again(), found, "that of its first compilation")
    costs = {"compile_s": compile_s, "cached_s": cached_s, "held_bytes": held}
    measured = Measured(**counts, **costs, seconds=seconds, whole_seconds=whole_seconds)
    measured.first_seconds, measured.whole_first_seconds = ([pair[place] for pair in firsts] for place in (0, 1))
    if not math.isnan(measured.handed_bytes):  # apart from the turns, whose caches it would empty
        handed = np.ones(int(measured.handed_bytes), np.uint8)
        copied = np.zeros_like(handed)
        measured.copy_seconds = repeated(lambda: np.copyto(copied, handed), most=rounds, most_s=math.inf)
    return measured


def _check_same(form: str, found: np.ndarray, expected: np.ndarray, whose: str) -> None:
    if not np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * float(np.abs(expected).max())):
        raise RuntimeError(f"{form}: its output differs from {whose} by {np.abs(found - expected).max():.3g}")
