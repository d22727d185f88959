"""The report of a user who has a device that we have not: what compiles on it, whether its integers are right, and how fast."""

import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import openvino as ov
import pandas as pd
from rich.table import Table

from experiments.lab import Lab
from experiments.progress import bar, say
from experiments.studies.base import Study
from experiments.studies.npu_cases import GraphCase, cases
from experiments.studies.npu_compile import NpuCompile
from experiments.studies.self_check_report import IMPORTED, Checked, report
from shadowattn.artifacts import versions, write_text
from shadowattn.device_check import CASES, Outcome, check_device
from shadowattn.devices import device_architecture, drivers, survey
from shadowattn.errors import InputError
from shadowattn.graph_check import GraphFile, GraphOutcome, check_graphs
from shadowattn.graphs.npu.compiler import NpuCompiler
from shadowattn.reporting.npu_predictions import case_name
from shadowattn.reporting.rows import Row

_UNITS = {"compile_s": "s", "median_ms": "ms", "p95_ms": "ms", "steps_off": "steps", "exact": "1", "recall": "1"}
_WHOLE_UNITS = {"compile_s": "s", "median_ms": "ms", "p95_ms": "ms", "difference": "1"}
_IMPORTED = next(
    case for case in cases(rows=1, keys=[], launch_heads=[], models=[], whole=[], attention_keys=[]) if case.part == "layout"
)


@dataclass(frozen=True)
class SelfCheck(Study):
    """Every form of estimation graph on every device of this machine; no model, no text."""

    needs: ClassVar[tuple[str, ...]] = ("threads",)
    headline: ClassVar[tuple[str, ...]] = ("median_ms", "recall", "exact")

    def inputs(self) -> dict[str, Any]:
        """Its subject is what is installed here."""
        return {"drivers": drivers(), "openvino": versions()["openvino"]}

    def measure(self, lab: Lab) -> list[Row]:
        """A row for each device, case and figure; `ran` is 1 or 0, and `flag` what went wrong."""
        devices, units = survey(), lab.units("cells")
        for device in devices:
            say(f"{device.name}: {device.full_name}, driver {device.driver}; {device.problem or 'a small INT8 graph ran on it'}")
        listed = [device.name for device in devices if device.full_name != "not found"]
        checked = {}
        for name in listed:
            say(f"{name}: {len(CASES)} cases, each compiled, compared with integer arithmetic and timed")
            outcomes = [Outcome(**one) for one in units.get(name, partial(_check, name))]
            whole = (
                [] if name == "CPU" else [GraphOutcome(**one) for one in units.get(f"{name} whole", partial(_check_whole, name))]
            )
            checked[name] = Checked(outcomes, whole, device_architecture(name) if name.split(".")[0] == "NPU" else "")
        write_text(lab.folder / "report.md", report(devices, checked))
        print(lab.folder / "report.md")
        rows = [row for name, done in checked.items() for outcome in done.forms for row in _rows(lab, name, outcome)]
        return rows + [row for name, done in checked.items() for outcome in done.whole for row in _whole_rows(lab, name, outcome)]

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """A line for each device and case; a whole graph has a difference to the CPU in place of integers."""
        figures = {"compile_s": 2, "median_ms": 3, "steps_off": 0, "exact": 4, "recall": 4, "difference": 4}
        header = ("compile s", "median ms", "steps off", "exact", "recall of top 20 %", "difference to the CPU", "INT8")
        table = Table("device", "case", *header, title=title)
        for (device, case), cell in rows.groupby(["estimate_device", "method"], sort=False):
            values = cell.set_index("metric").value
            if not values["ran"]:
                table.add_row(device, case, "failed", cell.flag.iloc[0][:60])
                continue
            int8 = {1.0: "yes", 0.0: "no"}.get(values.get("int8_primitive"), "not named")
            shown = (f"{values[metric]:.{places}f}" if metric in values else "" for metric, places in figures.items())
            table.add_row(device, case, *shown, int8)
        return table


def _check(device: str) -> list[dict]:
    return [asdict(outcome) for outcome in check_device(device, CASES, progress=lambda cases: bar(cases, device))]


def _check_whole(device: str) -> list[dict]:
    """The graphs of `+exp=npu_compile` that no form is, one part of one model after the other: their weights take room."""
    say(f"{device}: layouts, sizes, decoder blocks and attention, each compiled, compared with the CPU and timed")
    done = []
    for (kind, model), several in groupby(whole_cases(), key=lambda case: (case.part.split()[0], case.model)):
        with tempfile.TemporaryDirectory() as folder:
            files = [_saved(case, Path(folder) / f"{index}.xml") for index, case in enumerate(several)]
            done += check_graphs(device, files, progress=partial(bar, title=f"{device}, {kind}, {model}"))
    return [asdict(outcome) for outcome in done + _check_import(device)]


def whole_cases() -> list[GraphCase]:
    """Cases of `+exp=npu_compile` by its defaults, but for forms, banks and numbers of tiles."""
    of = NpuCompile()
    every = cases(rows=of.rows, keys=[], launch_heads=[], models=[], whole=of.whole, attention_keys=of.attention_keys)
    return [case for case in every if case.part != "form" and not case.tiles]


def _saved(case: GraphCase, path: Path) -> GraphFile:
    ov.save_model(case.build(), path, compress_to_fp16=False)
    shape = case.shape
    name = case_name(
        case.part, case.model, case.name, heads=shape.heads, group=shape.group, rows=shape.rows, keys=shape.keys,
        head_dim=shape.head_dim,
    )  # fmt: skip
    return GraphFile(name, str(path))


def _check_import(device: str) -> list[GraphOutcome]:
    """A graph that was compiled ahead for this NPU, imported: where the compiler is set up here, and the device is an NPU."""
    if device.split(".")[0] != "NPU":
        return []
    name = f"{IMPORTED}: {_IMPORTED.name}"
    with tempfile.TemporaryDirectory() as folder:
        blob = Path(folder) / "graph.blob"
        try:
            with NpuCompiler() as compiler:
                made = compiler.compile(_IMPORTED.build(), device_architecture(device).removeprefix("NPU"), blob)
        except InputError as error:
            return [GraphOutcome(name, error=str(error))]
        if made.error:
            return [GraphOutcome(name, error=made.error)]
        graph = _saved(_IMPORTED, Path(folder) / "graph.xml")
        return check_graphs(device, [replace(graph, case=name, blob=str(blob))])


def _rows(lab: Lab, device: str, outcome: Outcome) -> list[Row]:
    row = replace(
        lab.timing_row(), method=outcome.case, estimate_device=device, n=1, context_tokens=CASES[outcome.case][0].keys,
        flag=outcome.error,
    )  # fmt: skip
    ran = [replace(row, metric="ran", value=float(not outcome.error))]
    if outcome.error:
        return ran
    named = [] if outcome.int8 is None else [replace(row, metric="int8_primitive", value=float(outcome.int8))]
    shape = CASES[outcome.case][0]
    counts = dict.fromkeys(("median_ms", "p95_ms"), outcome.runs) | dict.fromkeys(("exact", "recall"), shape.heads * shape.rows)
    return (
        ran
        + named
        + [replace(row, metric=m, value=getattr(outcome, m), unit=unit, n=counts.get(m, 1)) for m, unit in _UNITS.items()]
    )


def _whole_rows(lab: Lab, device: str, outcome: GraphOutcome) -> list[Row]:
    row = replace(lab.timing_row(), method=outcome.case, estimate_device=device, n=1, flag=outcome.error)
    ran = replace(row, metric="ran", value=float(not outcome.error))
    if outcome.error:
        return [ran]
    counts = dict.fromkeys(("median_ms", "p95_ms"), outcome.runs)
    return [ran] + [
        replace(row, metric=m, value=getattr(outcome, m), unit=unit, n=counts.get(m, 1)) for m, unit in _WHOLE_UNITS.items()
    ]
