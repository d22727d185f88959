"""The report of `+exp=npu_selfcheck`: Markdown, complete enough to be sent by itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from experiments.environment import describe_machine
from experiments.publish import ROOT, read_reference
from shadowattn.artifacts import versions
from shadowattn.device_check import Outcome
from shadowattn.devices import SELFCHECK, UNVERIFIED, Capability
from shadowattn.graph_check import GraphOutcome
from shadowattn.reporting.npu_predictions import compared, comparison

IMPORTED = "compiled ahead and imported"
_COMPILED = ROOT / "results" / "reference" / "npu_compile.csv"


@dataclass(frozen=True)
class Checked:
    """What came of a device's forms and whole graphs; `architecture` of an NPU, such as 4000, empty of another device."""

    forms: Sequence[Outcome]
    whole: Sequence[GraphOutcome]
    architecture: str


def report(devices: Sequence[Capability], checked: Mapping[str, Checked]) -> str:
    """All of it: the devices, what ran on each, and an NPU's times beside the predicted ones."""
    npu = next(device for device in devices if device.name == "NPU")
    npus = {name: done for name, done in checked.items() if done.architecture}
    verdicts = [_verdict(name, done) for name, done in npus.items()] or [f"**no NPU was checked**: {npu.problem}"]
    verdict = "; ".join(verdicts)
    lines = ["# Device self-check", "", f"Made by `{SELFCHECK}`. Please send this file back.", "", f"Verdict: {verdict}.", ""]
    lines += ["## Devices", "", "| device | name | driver | capabilities | a small INT8 graph |", "|---|---|---|---|---|"]
    for device in devices:
        state = device.problem or "ran, and ranked keys as integer arithmetic does"
        lines.append(f"| {device.name} | {device.full_name} | {device.driver} | {', '.join(device.capabilities)} | {state} |")
    for name, done in checked.items():
        lines += ["", f"## {name}", "", *_forms(done.forms)]
        if done.whole:
            lines += ["", f"## {name}: whole graphs", "", *_whole(done.whole)]
        if done.architecture:
            lines += ["", f"## {name}: measured against predicted", "", *_against_predictions(done)]
    if not npus:
        lines += ["", "## Not verified, for want of an NPU", "", *(f"- {what}" for what in UNVERIFIED)]
    lines += ["", "## Machine", ""]
    lines += [f"- {key}: {value}" for key, value in (describe_machine() | versions()).items()]
    return "\n".join(lines) + "\n"


def _verdict(name: str, done: Checked) -> str:
    """Of every form and graph of an NPU, not of the small one that it was first tried with."""
    failed = [one.case for one in (*done.forms, *done.whole) if one.error]
    wrong = [one.case for one in done.forms if not one.error and not one.ranks] + [
        one.case for one in done.whole if not one.error and not one.agrees
    ]
    right = len(done.forms) + len(done.whole) - len(failed) - len(wrong)
    parts = [f"on {name} {right} of {len(done.forms) + len(done.whole)} graphs ran and were right"]
    parts += [f"**{what}**: {', '.join(cases)}" for what, cases in (("failed", failed), ("wrong", wrong)) if cases]
    return "; ".join(parts)


def _forms(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "| case | compile s | median ms | p95 ms | steps off | exact | recall of top 20 % | INT8 primitive |"
    yield "|---|---|---|---|---|---|---|---|"
    for o in outcomes:
        if o.error:
            yield f"| {o.case} | failed: {o.error} | | | | | | |"
            continue
        int8 = "not named" if o.int8 is None else "yes" if o.int8 else "no"
        times = f"{o.compile_s:.2f} | {o.median_ms:.3f} | {o.p95_ms:.3f}"
        yield f"| {o.case} | {times} | {o.steps_off:.0f} | {o.exact:.4f} | {o.recall:.4f} | {int8} |"


def _whole(outcomes: Sequence[GraphOutcome]) -> Iterator[str]:
    yield "| graph | compile s | median ms | p95 ms | difference to the CPU, of its output |"
    yield "|---|---|---|---|---|"
    for o in outcomes:
        times = f"failed: {o.error} | | |" if o.error else f"{o.compile_s:.2f} | {o.median_ms:.3f} | {o.p95_ms:.3f} |"
        yield f"| {o.case} | {times} {'' if o.error else f'{o.difference:.2%}'} |"


def _against_predictions(done: Checked) -> list[str]:
    if not _COMPILED.is_file():
        return [f"No `{_COMPILED.relative_to(ROOT)}` here to compare with: run this in a checkout of the repository."]
    right = [o for o in done.forms if o.ranks] + [o for o in done.whole if o.agrees]
    times = {o.case: o.median_ms for o in right}  # of a wrong result the time says nothing
    return comparison(compared(times, read_reference(_COMPILED), done.architecture), done.architecture)
