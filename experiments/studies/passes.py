"""What surgery on a decoder's graph buys: the first token, the next one and memory, by the size of the vocabulary.

Times: the graphs take turns in one process. Memory: each in a process of its own, peak over what the compiled graph holds.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.lab import Lab
from experiments.own_process import check_memory, in_own_process, peak_bytes
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.graphs.decoder.passes import LastTokenSlice, MakeStateful, rewritten
from shadowattn.graphs.decoder.whole import INPUTS, LOGITS, cache_names, whole_graph
from shadowattn.interleave import interleave
from shadowattn.models import load_random, model_shape
from shadowattn.models.known import KNOWN_MODELS
from shadowattn.reporting.figures.passes import draw as draw_passes
from shadowattn.reporting.rows import SpreadRow

FORMS = ("as converted", "last token", "stateful", "last token, stateful")
# The CPU plugin runs attention on a state by another kernel, which sums in another order.
_STATE_TOLERANCE = 1e-4
_LEGEND = (
    "first token: one call with the whole prompt; next token: one call with one token more; seconds, medians\n"
    "memory: what the first call needs at most beyond the compiled graph; in a process of its own"
)


@dataclass(frozen=True)
class PassesRow(SpreadRow):
    """A row about one form of the graph; the prompt has `context_tokens`. `threads` of OpenVINO."""

    vocabulary: int = 0
    threads: int = 0


@dataclass(frozen=True)
class Size:
    """A random model: a published shape with fewer layers and another vocabulary; `hidden` null for the shape's own."""

    shape: str
    layers: int
    vocabulary: int
    hidden: int | None = None


@dataclass(frozen=True)
class Passes(Study):
    """`shape` with `layers` layers and random weights, of each of `vocabularies`; prompts of `tokens`, `rounds` of each form."""

    vocabularies: list[int] = field(default_factory=lambda: [32_000, 64_000, 128_256, 151_936])
    shape: str = "qwen2_0_5b"
    layers: int = 2
    hidden: int | None = None
    tokens: int = 512
    rounds: int = 7
    needs: ClassVar[tuple[str, ...]] = ("threads",)
    headline: ClassVar[tuple[str, ...]] = ("first_token", "next_token", "peak_bytes")

    def __post_init__(self):
        if self.shape not in KNOWN_MODELS:
            raise InputError(f"study.shape: expected one of {', '.join(KNOWN_MODELS)}, got {self.shape!r}")
        if not self.vocabularies:
            raise InputError("study.vocabularies: expected at least one size, got none")
        for name in ("layers", "tokens", "rounds"):
            check_count(f"study.{name}", getattr(self, name))
        check_count("study.vocabularies", min(self.vocabularies))

    def check(self, lab: Lab) -> None:
        check_memory("this study measures it; run it on Linux")

    def measure(self, lab: Lab) -> list[PassesRow]:
        units, rows = lab.units("vocabularies"), []
        say(f"passes: {len(FORMS)} forms of {self.shape} with {self.layers} layers, prompts of {self.tokens} tokens")
        row = replace(lab.timing_row(PassesRow), model=f"random-{self.shape}", context_tokens=self.tokens, n=self.rounds)
        row = replace(row, threads=torch.get_num_threads())
        for vocabulary in bar(self.vocabularies, "passes"):
            size = Size(self.shape, self.layers, vocabulary, self.hidden)
            times = units.get(f"time-{vocabulary}", partial(in_own_process, time_forms, size, self.tokens, self.rounds))
            for form in FORMS:
                cell = replace(row, method=form, vocabulary=vocabulary)
                rows += [_spread(replace(cell, metric=metric, unit="s"), seconds) for metric, seconds in times[form].items()]
                memory = partial(in_own_process, first_call_bytes, form, size, self.tokens)
                peak = float(units.get(f"memory-{vocabulary}-{form}", memory))
                rows.append(replace(cell, metric="peak_bytes", unit="bytes", n=1, value=peak, low=peak, high=peak))
        return rows

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"passes": draw_passes(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A line a vocabulary and form."""
        values = rows.pivot_table(index=["vocabulary", "method"], columns="metric", values="value", sort=False)
        table = Table("vocabulary", "graph", "first token, s", "next token, s", "memory, MiB", title=title, title_justify="left")
        for (vocabulary, form), at in values.iterrows():
            cells = f"{at.first_token:.3f}", f"{at.next_token:.4f}", f"{at.peak_bytes / 2**20:.0f}"
            table.add_row(f"{vocabulary}", form, *cells)
        return Group(table, _LEGEND)


def time_forms(size: Size, tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of the first and of the next token by every form, `rounds` of each.

    Raises `RuntimeError` where a pass changed the logits.
    """
    calls = {form: _Caller(form, size) for form in FORMS}
    times: dict[str, dict[str, list[float]]] = {form: {} for form in FORMS}
    for metric, step in (("first_token", _Caller.first), ("next_token", _Caller.following)):
        if metric == "next_token":
            for one in calls.values():
                one.first(tokens)
        found = interleave({form: partial(step, one, tokens) for form, one in calls.items()}, rounds=rounds, warmup=1)
        for form in FORMS:
            times[form][metric] = [float(second) for second in found[form].seconds]
    whole, last, stateful, both = (calls[form].first(tokens)[:, -1] for form in FORMS)
    if not (np.array_equal(whole, last) and np.array_equal(stateful, both)):
        raise RuntimeError("passes: the slice changed the logits of the last token")
    if not np.allclose(whole, stateful, atol=_STATE_TOLERANCE):
        raise RuntimeError("passes: keys and values as state changed the logits of the last token")
    return times


def first_call_bytes(form: str, size: Size, tokens: int) -> int:
    """What the first call needs at most beyond what the process holds once the graph is compiled."""
    caller = _Caller(form, size)
    caller.first(1)  # whatever is made once
    return peak_bytes(lambda: caller.first(tokens))


class _Caller:
    """One compiled form of a random model's graph, with the keys and values that it takes."""

    def __init__(self, form: str, size: Size):
        model = load_random(size.shape, layers=size.layers, vocabulary=size.vocabulary, hidden=size.hidden).model
        names, graph = cache_names(size.layers), whole_graph(model)
        matchers = [LastTokenSlice()] if "last token" in form else []
        matchers += [MakeStateful(graph, names)] if "stateful" in form else []
        rewritten(graph, *matchers)
        self._names = {} if "stateful" in form else names
        shape = model_shape(model)
        self._empty = np.zeros((1, shape.kv_heads, 0, shape.head_dim), np.float32)
        self._vocabulary, self._past, self._in_state = size.vocabulary, {}, 0
        hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self._request = core().compile_model(graph, "CPU", hints).create_infer_request()

    def first(self, tokens: int) -> np.ndarray:
        """The logits of a prompt of random tokens, the same each time."""
        self._request.reset_state()
        self._in_state = 0
        self._past = dict.fromkeys(self._names, self._empty)
        logits = self._call(np.random.default_rng(0).integers(0, self._vocabulary, (1, tokens)), 0)
        self._past = {name: np.array(self._request.get_tensor(present).data) for name, present in self._names.items()}
        return logits

    def following(self, before: int) -> np.ndarray:
        """The logits of one token behind the prompt. A state grows by it; keys and values that are given stay as they are."""
        return self._call(np.zeros((1, 1), np.int64), before if self._names else self._in_state)

    def _call(self, ids: np.ndarray, before: int) -> np.ndarray:
        rows = ids.shape[1]
        mask = np.triu(np.full((1, 1, rows, before + rows), np.finfo(np.float32).min, np.float32), before + 1)
        self._in_state = before + rows
        given = dict(zip(INPUTS, (ids, mask, np.arange(before, before + rows)[None]), strict=True))
        return self._request.infer(given | self._past)[LOGITS]


def _spread(row: PassesRow, seconds: list[float]) -> PassesRow:
    low, median, high = (float(x) for x in np.percentile(seconds, (25, 50, 75)))
    return replace(row, value=median, low=low, high=high)
