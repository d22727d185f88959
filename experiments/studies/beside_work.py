"""Sparse and dense attention while other programs want the same cores: how much slower each becomes (the paper's Table 9)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from experiments.own_process import in_own_process
from experiments.progress import bar, say
from experiments.random_layers import SHAPES, Case, Tensors
from experiments.refusals import check_choice, check_count
from experiments.studies import attention_candidates as candidates
from experiments.studies.base import Study
from shadowattn.errors import InputError, StageError
from shadowattn.interleave import interleave
from shadowattn.kernels import native
from shadowattn.models.load import DTYPES
from shadowattn.reporting.figures.beside_work import draw as draw_beside_work
from shadowattn.reporting.rows import SpreadRow

QUIET = "nothing"
# What a program does first, and then again and again; `{threads}` is the number of ours.
_LOOP = ("", "for _ in range(10**6): pass")
_PRODUCTS = ("import torch; torch.set_num_threads({threads}); a = torch.ones(768, 768)", "a @ a")
# Programs that run beside, by name.
LOADS = {
    QUIET: (),
    "one loop": (_LOOP,),
    "two loops": (_LOOP, _LOOP),
    "torch": (_PRODUCTS,),
}
# How libgomp's threads wait for work: spinning, which is its default, or asleep, as `experiments.run` sets it.
WAITING = {"spinning": "300000", "asleep": "0"}
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
Spent = dict[str, dict[str, dict[str, list[float]]]]  # by load, way to attend, and clock, `wall` or `cpu`: seconds of each round
_BASELINE = candidates.BASELINES[0]


@dataclass(frozen=True)
class BesideRow(SpreadRow):
    """A row about a chunk of a layer of `model`'s shape, computed beside `load`; libgomp's threads wait as `waiting` says."""

    dtype: str = ""
    load: str = ""
    waiting: str = ""
    threads: int = 0


@dataclass(frozen=True)
class BesideWork(Study):
    """The last `rows` rows of `keys` keys at `retention`, random tensors of layers of `shapes`, beside each of `loads`.

    Loads: `one loop` and `two loops`, processes of one thread each that compute for ever; `torch`, one with as many threads as
    ours that multiplies matrices. They run by turns for `rounds` rounds, are stopped in between, and every way to attend is timed
    within each turn. Once for each of `waiting`: libgomp's threads, torch's and ours, spin while they wait, which is what a user
    of the library has, or sleep.

    Beside its time each call has the process's processor time, of all threads: a call slows down since it needs more of that, as
    threads that spin and caches that others filled do, or since it has fewer of the cores. Of short calls that is uncertain: it
    counts threads of the call before that still spin. A pause between calls would let these sleep, but the first threads to wake
    up then share a core for a while, which no layer of a prefill does.
    """

    shapes: list[str] = field(default_factory=lambda: ["smollm2-135m"])
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    loads: list[str] = field(default_factory=lambda: list(LOADS))
    waiting: list[str] = field(default_factory=lambda: list(WAITING))
    rounds: int = 15
    rows: int = 512
    keys: int = 8192
    retention: float = 0.2
    query_block: int = 32
    needs: ClassVar[tuple[str, ...]] = ("threads",)
    headline: ClassVar[tuple[str, ...]] = ("slowdown", "slowdown_over_sdpa", "cpu_time_over_quiet", "cores")

    def __post_init__(self):
        options = {"shapes": tuple(SHAPES), "dtypes": tuple(DTYPES), "loads": tuple(LOADS), "waiting": tuple(WAITING)}
        for name, known in options.items():
            if not getattr(self, name):
                raise InputError(f"study.{name}: expected at least one, got none")
            for value in getattr(self, name):
                check_choice(f"study.{name}", value, known)
        if QUIET not in self.loads:
            raise InputError(f"study.loads: expected {QUIET}, which others are compared with, among them, got {list(self.loads)}")
        for name in ("rounds", "rows", "query_block"):
            check_count(f"study.{name}", getattr(self, name))
        check_count("study.keys", self.keys, least=self.rows)
        if not 0 < self.retention <= 1:
            raise InputError(f"study.retention: expected a share of the visible keys, in (0, 1], got {self.retention}")

    def check(self, lab: Lab) -> None:
        native.require()
        if sys.platform != "linux":
            raise InputError(f"study.loads: programs beside are stopped and ended by Linux, got {sys.platform}; run it on Linux")

    def measure(self, lab: Lab) -> list[BesideRow]:
        units, rows = lab.units("times"), []
        cases = [(Case(shape, DTYPES[dtype], self.keys, self.rows, self.retention), waiting)
                 for shape in self.shapes for dtype in self.dtypes for waiting in self.waiting]  # fmt: skip
        say(f"time: {len(cases)} cases beside {', '.join(self.loads)}; {self.rounds} rounds, loads and candidates take turns")
        kernel = f"native ({native.level()})"
        row = replace(lab.timing_row(BesideRow), n=self.rounds, kernel=kernel, threads=torch.get_num_threads())
        for case, waiting in bar(cases, "cases"):
            key = f"{case.shape} {case.dtype_name} {case.keys} {case.rows} {case.retention:g} {waiting}"
            spent = units.get(key, partial(self._spent, case, waiting))
            rows += rows_of(replace(row, waiting=waiting), case, spent)
        return rows

    def _spent(self, case: Case, waiting: str) -> Spent:
        with _environment(GOMP_SPINCOUNT=WAITING[waiting]):
            return in_own_process(time_beside, case, self.query_block, list(self.loads), self.rounds)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"beside_work": draw_beside_work(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        return Group(*(_case_table(some, title) for _, some in rows.groupby(["model", "dtype", "waiting"], sort=False)))


class _CpuClock:
    """A call that notes the seconds of processor time that all threads of the process take for it."""

    def __init__(self, call: Callable[[], object]):
        self._call = call
        self.seconds: list[float] = []

    def __call__(self) -> None:
        start = time.process_time()
        self._call()
        self.seconds.append(time.process_time() - start)


def time_beside(case: Case, query_block: int, loads: list[str], rounds: int) -> Spent:
    """What each way to attend takes beside each load. In a process of its own, whose environment says how libgomp waits."""
    t = Tensors(case)
    calls: dict[str, Callable[[], object]] = candidates.baselines(t) | candidates.totals(t, 1)
    calls |= candidates.totals(t, 1, estimators=("hierarchical",))
    calls |= candidates.totals(t, query_block, "probability", ("int8_fused",))
    for call in calls.values():
        call()
    spent: Spent = {load: {name: {"wall": [], "cpu": []} for name in calls} for load in loads}
    with Programs(loads, torch.get_num_threads()) as programs:
        for _ in range(rounds):
            for load in loads:
                clocked = {name: _CpuClock(call) for name, call in calls.items()}
                with programs.running(load):
                    timings = interleave(clocked, rounds=1, warmup=0)
                for name, timing in timings.items():
                    spent[load][name]["wall"] += timing.seconds
                    spent[load][name]["cpu"] += clocked[name].seconds
    return spent


class Programs:
    """The processes of several loads, all stopped but those of the load that is `running`; ended at the end of the block."""

    def __init__(self, loads: list[str], threads: int):
        self._loads, self._threads = loads, threads
        self._processes: dict[str, list[subprocess.Popen]] = {}

    def __enter__(self) -> "Programs":
        try:
            for load in self._loads:
                self._processes[load] = []
                for first, again in LOADS[load]:
                    self._processes[load].append(_begin(load, first.format(threads=self._threads), again))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in (process for some in self._processes.values() for process in some):
            process.kill()
            process.wait()
            process.stdout.close()

    @contextmanager
    def running(self, load: str) -> Iterator[None]:
        """Raises `StageError` where one of the load's processes ended meanwhile."""
        for process in self._processes[load]:
            process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            for process in self._processes[load]:
                process.send_signal(signal.SIGSTOP)
        for process in self._processes[load]:
            if process.poll() is not None:
                raise StageError(
                    f"study.loads: a program of {load!r} ended with status {process.returncode} while others were timed"
                )


def _begin(load: str, first: str, again: str) -> subprocess.Popen:
    """A process that has done what comes first, and is stopped; the system ends it with the one that began it, also stopped.

    Raises `StageError` where it ended before.
    """
    end_with_parent = f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})"
    code = "\n".join([end_with_parent, first, "print(flush=True)", "while True:", f"    {again}"])
    # libgomp waits in it as by default, whatever is set for ours.
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    try:
        if not process.stdout.readline():
            raise StageError(f"study.loads: the program {load!r} ended with status {process.wait()} before it could be stopped")
    except BaseException:
        process.kill()
        process.stdout.close()
        raise
    process.send_signal(signal.SIGSTOP)
    return process


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    """Variables for the processes that are begun within."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ |= changes
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def rows_of(row: BesideRow, case: Case, spent: Spent) -> Iterator[BesideRow]:
    """Time beside each load, how many times that of the quiet machine it is, and that over what it is for torch's attention; the
    processor time, how many times that of the quiet machine it is, and over the call's time, which is how many cores it had.

    Quotients are of a round's two times; medians and quartiles over rounds.
    """
    row = replace(row, model=case.shape, dtype=case.dtype_name)
    row = replace(row, context_tokens=case.keys, chunk_rows=case.rows, retention=case.retention)
    for load, by_method in spent.items():
        for method, took in by_method.items():
            quiet, cpu = spent[QUIET][method], took["cpu"]
            slowdown = np.divide(took["wall"], quiet["wall"])
            over = slowdown / np.divide(by_method[_BASELINE]["wall"], spent[QUIET][_BASELINE]["wall"])
            one = replace(row, load=load, method=method, **candidates.labels(method))
            for metric, values, unit in (
                ("time", 1e3 * np.array(took["wall"]), "ms"),
                ("slowdown", slowdown, "1"),
                ("slowdown_over_sdpa", over, "1"),
                ("cpu_time", 1e3 * np.array(cpu), "ms"),
                ("cpu_time_over_quiet", np.divide(cpu, quiet["cpu"]), "1"),
                ("cores", np.divide(cpu, took["wall"]), "1"),
            ):
                low, median, high = np.percentile(values, (25, 50, 75))
                yield replace(one, metric=metric, value=float(median), low=float(low), high=float(high), unit=unit)


def _case_table(rows: pd.DataFrame, title: str) -> Table:
    """A line a way to attend, a column a load: time, how many times that of the quiet machine, and what that is due to."""
    first, cells = rows.iloc[0], rows.set_index(["load", "method", "metric"]).value
    loads = list(dict.fromkeys(rows.load))
    case = f"{first.model} {first['dtype']}, {first.context_tokens} keys, {first.retention:g}, threads {first.waiting}"
    table = Table(
        "candidate", *(f"beside {load}, ms" for load in loads), title=f"{title} · {case} · measured", title_justify="left"
    )
    for method in dict.fromkeys(rows.method):
        shown = []
        for load in loads:
            of = {metric: cells[load, method, metric] for metric in ("time", "cores", *BesideWork.headline)}
            due = f", × {of['slowdown']:.2f}: processor time × {of['cpu_time_over_quiet']:.2f}" if load != QUIET else ""
            shown.append(f"{of['time']:.1f}{due}, {of['cores']:.2f} cores")
        table.add_row(method, *shown)
    return table
