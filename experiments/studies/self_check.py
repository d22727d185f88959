"""The report of a user who has a device that we have not: what compiles on it, whether its integers are right, and how fast."""

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import pandas as pd
from rich.table import Table

from experiments.environment import describe_machine
from experiments.lab import Lab
from experiments.progress import bar, say
from experiments.publish import ROOT, read_reference
from experiments.studies.base import Study
from shadowattn.artifacts import versions, write_text
from shadowattn.device_check import CASES, Outcome, check_device
from shadowattn.devices import SELFCHECK, UNVERIFIED, Capability, device_architecture, drivers, survey
from shadowattn.reporting.npu_predictions import compared, comparison
from shadowattn.reporting.rows import Row

_COMPILED = ROOT / "results" / "reference" / "npu_compile.csv"
_UNITS = {"compile_s": "s", "median_ms": "ms", "p95_ms": "ms", "steps_off": "steps", "exact": "1", "recall": "1"}


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
        devices = survey()
        for device in devices:
            say(f"{device.name}: {device.full_name}, driver {device.driver}; {device.problem or 'a small INT8 graph ran on it'}")
        listed = [device for device in devices if device.full_name != "not found"]
        outcomes = {}
        for device in listed:
            say(f"{device.name}: {len(CASES)} cases, each compiled, compared with integer arithmetic and timed")
            records = lab.units("cells").get(device.name, lambda device=device: _check(device.name))
            outcomes[device.name] = [Outcome(**outcome) for outcome in records]
        write_text(lab.folder / "report.md", _report(devices, outcomes) + _against_predictions(outcomes))
        print(lab.folder / "report.md")
        return [row for name, done in outcomes.items() for outcome in done for row in _rows(lab, name, outcome)]

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """A line for each device and case."""
        table = Table("device", "case", "compile s", "median ms", "steps off", "exact", "recall of top 20 %", "INT8", title=title)
        for (device, case), cell in rows.groupby(["estimate_device", "method"], sort=False):
            values = cell.set_index("metric").value
            if not values["ran"]:
                table.add_row(device, case, "failed", cell.flag.iloc[0][:60])
                continue
            int8 = {1.0: "yes", 0.0: "no"}.get(values.get("int8_primitive"), "not named")
            digits = {"compile_s": 2, "median_ms": 3, "steps_off": 0, "exact": 4, "recall": 4}
            shown = (f"{values[metric]:.{places}f}" for metric, places in digits.items())
            table.add_row(device, case, *shown, int8)
        return table


def _check(device: str) -> list[dict]:
    return [asdict(outcome) for outcome in check_device(device, CASES, progress=lambda cases: bar(cases, device))]


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


def _against_predictions(outcomes: dict[str, list[Outcome]]) -> str:
    """Markdown: an NPU's times beside what its compiler predicts of the same graphs; empty where no NPU ran."""
    lines = []
    for name, done in outcomes.items():
        if name.split(".")[0] != "NPU":
            continue
        lines += ["", f"## {name}: measured against predicted", ""]
        architecture = device_architecture(name)
        if not _COMPILED.is_file():
            lines.append(f"No `{_COMPILED.relative_to(ROOT)}` here to compare with: run this in a checkout of the repository.")
            continue
        cases = compared({o.case: o.median_ms for o in done}, read_reference(_COMPILED), architecture)
        lines += comparison(cases, architecture)
    return "\n".join(lines) + "\n" if lines else ""


def _report(devices: list[Capability], outcomes: dict[str, list[Outcome]]) -> str:
    """Markdown, complete enough to be sent by itself."""
    lines = ["# Device self-check", "", f"Made by `{SELFCHECK}`. Please send this file back.", ""]
    npu = next(device for device in devices if device.name == "NPU")
    verdict = "an NPU was found and works" if not npu.problem else f"**no NPU was checked**: {npu.problem}"
    lines += [f"Verdict: {verdict}.", "", "## Devices", ""]
    lines += ["| device | name | driver | capabilities | a small INT8 graph |", "|---|---|---|---|---|"]
    for device in devices:
        state = device.problem or "ran, and ranked keys as integer arithmetic does"
        lines.append(f"| {device.name} | {device.full_name} | {device.driver} | {', '.join(device.capabilities)} | {state} |")
    for name, done in outcomes.items():
        lines += ["", f"## {name}", ""]
        lines += ["| case | compile s | median ms | p95 ms | steps off | exact | recall of top 20 % | INT8 primitive |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for o in done:
            int8 = "not named" if o.int8 is None else "yes" if o.int8 else "no"
            lines.append(
                f"| {o.case} | failed: {o.error} | | | | | | |" if o.error else
                f"| {o.case} | {o.compile_s:.2f} | {o.median_ms:.3f} | {o.p95_ms:.3f} | {o.steps_off:.0f} | {o.exact:.4f} | "
                f"{o.recall:.4f} | {int8} |"
            )  # fmt: skip
    if npu.problem:
        lines += ["", "## Not verified, for want of an NPU", "", *(f"- {what}" for what in UNVERIFIED)]
    lines += ["", "## Machine", ""]
    lines += [f"- {key}: {value}" for key, value in (describe_machine() | versions()).items()]
    return "\n".join(lines) + "\n"
