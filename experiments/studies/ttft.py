"""Time to the first token: the engine beside others on the same prompts, and what each costs in quality."""

import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.table import Table

from experiments.cells import paired_error
from experiments.engines import refuse_form, refuse_look_ahead
from experiments.lab import Lab
from experiments.own_process import check_memory, in_own_process, peak_bytes, peak_resident_bytes
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from experiments.studies.prefill_runners import Quality, Read, Runner
from shadowattn.errors import InputError
from shadowattn.reporting.figures.ttft import draw as draw_ttft
from shadowattn.reporting.rows import SpreadRow

_SHORT = 16  # tokens of a prompt for which a runner makes what it makes once


@dataclass(frozen=True)
class TtftRow(SpreadRow):
    """A row about one runner and one length of prompt, `context_tokens`; `threads` of torch and OpenVINO."""

    threads: int = 0
    output_layer: str = ""  # `head` of the engine's form
    setting: str = ""  # what decides which keys a runner reads, such as a threshold


@dataclass(frozen=True)
class Ttft(Study):
    """Every one of `runners`, by name, on prompts of held-out text of each of `prompts` tokens, and then `new_tokens` new ones.

    Runners take turns in one process for each length, `rounds` rounds after one that does not count. Each round has a prompt of
    its own, the same for all runners. `baseline` is the runner that others are held to, in time and in the loss of the
    evaluation's windows. With `memory` each also reads a longest prompt in a process of its own, which tells what that takes
    beside the model, and what the whole process takes meanwhile.
    """

    runners: dict[str, Any] = field(default_factory=dict)
    baseline: str = "transformers"
    prompts: list[int] = field(default_factory=lambda: [1024, 2048, 4096])
    new_tokens: int = 16
    rounds: int = 3
    memory: bool = True
    needs: ClassVar[tuple[str, ...]] = ("model", "data", "evaluation", "seed", "engine", "threads")
    headline: ClassVar[tuple[str, ...]] = ("time_to_first_token", "times_faster", "tokens_per_second", "loss_increase")

    def __post_init__(self):
        for name, runner in self.runners.items():
            if not isinstance(runner, Runner):
                raise InputError(
                    f"study.runners.{name}: expected a runner of experiments.studies.prefill_runners, got {runner!r}"
                )
        if self.baseline not in self.runners:
            raise InputError(f"study.baseline: expected one of {', '.join(self.runners) or 'study.runners'}, got {self.baseline}")
        if not self.prompts:
            raise InputError("study.prompts: expected at least one length, got none")
        for name, least in (("new_tokens", 2), ("rounds", 1)):
            check_count(f"study.{name}", getattr(self, name), least=least)
        check_count("study.prompts", min(self.prompts))

    def check(self, lab: Lab) -> None:
        refuse_look_ahead(lab, "use study.runners.NAME.look_ahead")
        refuse_form(lab, "use study.runners.NAME.form")
        for runner in self.runners.values():
            runner.check(lab)
        if self.memory:
            check_memory("set study.memory=false")
        longest = max(self.prompts) + self.new_tokens
        if longest > lab.shape.context_tokens:
            raise InputError(
                f"study.prompts: the model's context is {lab.shape.context_tokens} tokens, got {max(self.prompts)} and "
                f"study.new_tokens={self.new_tokens}; make them shorter"
            )
        self._prompts(lab, max(self.prompts))

    def measure(self, lab: Lab) -> list[TtftRow]:
        return replace(self, runners={name: runner.fitted(lab) for name, runner in self.runners.items()})._rows(lab)

    def _rows(self, lab: Lab) -> list[TtftRow]:
        units, rows = lab.units("cells"), []
        say(f"ttft: {len(self.runners)} runners, prompts of {', '.join(map(str, self.prompts))} tokens, {self.rounds} rounds")
        row = replace(lab.row(TtftRow), path_kind="timing", threads=torch.get_num_threads(), n=self.rounds)
        if self.memory:  # first, while this process holds no readers
            rows += self._memory_rows(lab, replace(row, unit="bytes", n=1))
        for tokens in bar(self.prompts, "ttft"):
            prompts = self._prompts(lab, tokens)
            # In a process of its own, since the memory of all readers together is not given back for the next length.
            taken = units.get(f"{tokens}", partial(in_own_process, taken_seconds, lab, self.runners, prompts, self.new_tokens))
            base = taken[self.baseline]["first"]
            for name, one in taken.items():
                cell = replace(self._of(row, name), context_tokens=tokens)
                rows.append(_spread(replace(cell, metric="time_to_first_token", unit="s"), one["first"]))
                rows.append(_spread(replace(cell, metric="times_faster"), np.divide(base, one["first"])))
                rows.append(_spread(replace(cell, metric="cpu_seconds", unit="s"), one["cpu"]))
                rows.append(_spread(replace(cell, metric="tokens_per_second", unit="tokens/s"), one["rate"]))
        return rows + self._quality_rows(lab, replace(row, path_kind="quality", threads=0))

    def _of(self, row: TtftRow, name: str) -> TtftRow:
        runner = self.runners[name]
        return replace(row, method=name, retention=runner.retention, output_layer=runner.output_layer, setting=runner.setting)

    def _prompts(self, lab: Lab, tokens: int) -> list[list[int]]:
        """One for each round and one to warm up, all different: some runners keep what they read before."""
        ids = lab.loaded.tokenizer(lab.corpus.heldout, verbose=False).input_ids
        count, step = self.rounds + 1, max(1, (len(ids) - tokens) // (self.rounds + 1))
        if len(ids) < tokens + count:
            raise InputError(
                f"data {lab.corpus.name}: expected {tokens + count} held-out tokens, got {len(ids)}; take a longer text"
            )
        return [ids[index * step : index * step + tokens] for index in range(count)]

    def _memory_rows(self, lab: Lab, row: TtftRow) -> list[TtftRow]:
        units, rows, tokens = lab.units("memory"), [], max(self.prompts)
        prompt = self._prompts(lab, tokens)[0]
        for name, runner in bar(list(self.runners.items()), "memory"):
            found = units.get(name, partial(in_own_process, reading_bytes, lab, runner, prompt))
            cell = replace(self._of(row, name), context_tokens=tokens)
            rows += [replace(cell, metric=metric, value=value, low=value, high=value) for metric, value in found.items()]
        return rows

    def _quality_rows(self, lab: Lab, row: TtftRow) -> list[TtftRow]:
        units, windows = lab.units("quality"), lab.heldout()
        found = {
            name: Quality(**units.get(name, partial(_quality, runner, lab, windows)))
            for name, runner in bar(list(self.runners.items()), "loss")
        }
        rows, base = [], found[self.baseline].losses
        for name, of in found.items():
            cell = replace(self._of(row, name), n=windows.numel() - len(windows), unit="nat")
            increase, error = float(np.mean(of.losses) - np.mean(base)), paired_error(of.losses, base)
            rows.append(replace(cell, metric="loss_increase", value=increase, low=increase, high=increase))
            rows.append(replace(cell, metric="loss_increase_error", value=error, low=error, high=error, n=len(windows)))
            rows.append(replace(cell, metric="density", unit="1", value=of.density, low=of.density, high=of.density))
        return rows

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"ttft": draw_ttft(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """A line for each runner: seconds by length, times faster at the longest, decode rate, loss."""
        first = rows[rows.metric == "time_to_first_token"].set_index(["method", "context_tokens"]).value
        longest = max(self.prompts)
        at = {metric: rows[(rows.metric == metric) & (rows.context_tokens == longest)].set_index("method").value for metric in
              ("times_faster", "cpu_seconds", "tokens_per_second")}  # fmt: skip
        peaks = rows[rows.metric.isin(["reading_bytes", "process_peak_bytes"])].set_index(["method", "metric"]).value
        loss, error, density = (
            rows[rows.metric == metric].set_index("method").value
            for metric in ("loss_increase", "loss_increase_error", "density")
        )
        memory = ["MB for the prompt", "MB of the process"] if len(peaks) else []
        table = Table(
            "seconds to the first token", *(f"{tokens} tokens" for tokens in self.prompts), f"times faster, {longest}",
            "CPU seconds", "tokens/s after it", *memory, "of the keys", "loss above, nat", title=title, title_justify="left",
        )  # fmt: skip
        for name in self.runners:
            cells = [f"{first[name, tokens]:.2f}" for tokens in self.prompts]
            cells += [f"{values[name]:.2f}" for values in at.values()]
            cells += [f"{peaks[name, metric] / 1e6:.0f}" for metric in ("reading_bytes", "process_peak_bytes") if len(peaks)]
            table.add_row(name, *cells, f"{density[name]:.0%}", f"{loss[name]:+.3f} ± {error[name]:.3f}")
        return table


def taken_seconds(lab: Lab, runners: dict[str, Runner], prompts: list[list[int]], new_tokens: int) -> dict[str, dict[str, list]]:
    """Seconds to the first token, CPU seconds of it, and tokens a second after it, of each runner in each round but the first.

    Runners take turns on each of the prompts, which are equally long.
    """
    readers = {name: runner.reader(lab, len(prompts[0]) + new_tokens) for name, runner in runners.items()}
    taken = {name: {"first": [], "cpu": [], "rate": []} for name in runners}
    for index, prompt in enumerate(prompts):
        for name, read in readers.items():
            first, cpu, rate = _timed(read, prompt, new_tokens)
            if index:  # the first round warms up
                for metric, value in (("first", first), ("cpu", cpu), ("rate", rate)):
                    taken[name][metric].append(value)
    return taken


def reading_bytes(lab: Lab, runner: Runner, prompt: list[int]) -> dict[str, float]:
    """What a runner needs at most for a prompt, keys and values included: `reading_bytes` beyond what this process holds once it
    can read one, and `process_peak_bytes` of the whole process meanwhile, with its model and libraries.
    """
    read = runner.reader(lab, len(prompt) + 1)
    list(read(prompt[:_SHORT], 1))
    reading = peak_bytes(lambda: list(read(prompt, 1)))
    return {"reading_bytes": float(reading), "process_peak_bytes": float(peak_resident_bytes())}


def _quality(runner: Runner, lab: Lab, windows: torch.Tensor) -> dict[str, Any]:
    return asdict(runner.quality(lab, windows))


def _timed(read: Read, prompt: list[int], new_tokens: int) -> tuple[float, float, float]:
    cpu, began = time.process_time(), time.perf_counter()
    tokens = iter(read(prompt, new_tokens))
    next(tokens)
    first, spent = time.perf_counter() - began, time.process_time() - cpu
    later, began = 0, time.perf_counter()
    for _ in tokens:
        later += 1
    return first, spent, later / (time.perf_counter() - began)


def _spread(row: TtftRow, values: list[float] | np.ndarray) -> TtftRow:
    low, median, high = (float(x) for x in np.percentile(values, (25, 50, 75)))
    return replace(row, value=median, low=low, high=high)
