"""What the tables of README and docs have in common: published rows, a table in Markdown, and where its rows are from."""

import json
import re
from collections.abc import Iterable
from typing import Any

import pandas as pd

from experiments.provenance import origin_line
from experiments.publish import ROOT, read_reference

REFERENCE = ROOT / "results" / "reference"
SHAPES = {"qwen2-0.5b": "Qwen2-0.5B", "qwen2-1.5b": "Qwen2-1.5B", "phonelm-1.5b": "PhoneLM-1.5B", "smollm2-135m": "SmolLM2-135M"}
_SHARE = re.compile(r" shard\.(index|count)=\d+")  # of the process that measured last; the command without them measures all
_MARKS = "†‡§¶"  # of flagged cells
INCREASE = ("loss_increase", "loss_increase_error")


def rows_of(name: str) -> pd.DataFrame:
    """Published rows by the name of their file."""
    return read_reference(REFERENCE / f"{name}.csv")


def one(rows: pd.DataFrame, **where: object) -> float:
    """The value of the only row that fits."""
    for column, value in where.items():
        rows = rows[rows[column] == value]
    if len(rows) != 1:
        raise ValueError(f"expected one row with {where}, got {len(rows)}")
    return float(rows.value.iloc[0])


def table(header: Iterable[str], lines: Iterable[Iterable[str]], name: str, n: str) -> str:
    """A table and the line below it: of which published rows it is, and what is counted."""
    header = list(header)
    cells = [header, ["---"] * len(header), *map(list, lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + f"\n\n{source(name, n)}"


def _origin(name: str) -> dict:
    return json.loads((REFERENCE / f"{name}.json").read_text())


def recorded(name: str) -> bool:
    """Whether it is known where and by what code they were measured."""
    return _origin(name).get("recorded", True)


def source(name: str, n: str) -> str:
    """Where rows were measured, from the file beside them."""
    origin = _origin(name)
    if not recorded(name):
        return (
            f"`results/reference/{name}.csv`, {n}; machine and versions **not recorded**, published in commit "
            f"{origin['published_in'][:7]}, older than the code"
        )
    command = f"`{_SHARE.sub('', origin['command'])}`"
    if "command_today" in origin:
        command = f"`{origin['command_today']}`, which then was {command}"
    on = origin_of(name)
    although = "".join(f"; {reason}" for reason in origin.get("published_although", []))
    return f"`results/reference/{name}.csv`, {n}; {on}{although}; {command}"


def above(comparison: Any) -> str:
    """The loss of a method above its rival's with the 95 % interval, of a line of `reporting.verdicts.gains`."""
    return f"{-comparison.gain:+.3f} ({-comparison.high:+.3f} … {-comparison.low:+.3f})"


def commit_of(name: str) -> str:
    """The commit by whose code published rows were measured, shortened."""
    return _origin(name)["commit"][:7]


def origin_of(name: str) -> str:
    """By what machine and code published rows were measured, in one line."""
    origin = _origin(name)
    return origin_line(rows_of(name), origin["machine"], origin["commit"], origin["dirty"])


def loss_cells(rows: pd.DataFrame) -> tuple[dict[tuple[str, float], str], str]:
    """Loss above dense ± its standard error of every method and retention, with a mark for each flag; and what the marks say."""
    placed = rows.set_index(["method", "retention"])
    increase, error = (placed.value[placed.metric == metric] for metric in INCREASE)
    marks, legend = loss_marks(rows)
    return {cell: f"{increase[cell]:+.3f} ± {error[cell]:.3f}{marks[cell]}" for cell in increase.index}, legend


def full_int8(rows: pd.DataFrame) -> str:
    """What static INT8 attention of the same windows loses, as the end of the line below a table."""
    cells = rows[rows.method == "npu_full"].drop_duplicates("metric").set_index("metric").value
    loss, error = (cells[metric] for metric in INCREASE)
    return f"; static INT8 attention (`npu_full`) loses {loss:+.3f} ± {error:.3f} nat (one standard error)"


def loss_marks(rows: pd.DataFrame) -> tuple[dict[tuple[str, float], str], str]:
    """The marks of every method and retention, one for each flag of its loss; and what they say."""
    return flag_marks(rows[rows.metric == "loss_increase"].set_index(["method", "retention"]).flag)


def flag_marks(flags: pd.Series) -> tuple[dict[tuple, str], str]:
    """The marks of every flagged place, one for each of its flags; and what they say."""
    flags = flags.fillna("").str.split("; ")
    found = dict.fromkeys(flag for cell in flags for flag in cell if flag)
    if len(found) > len(_MARKS):
        raise ValueError(f"expected at most {len(_MARKS)} different flags, got {', '.join(found)}; add marks")
    marks = dict(zip(found, _MARKS, strict=False))
    said = {cell: "".join(f" {marks[flag]}" for flag in of_cell if flag) for cell, of_cell in flags.items()}
    return said, "".join(f"; {mark} {flag}" for flag, mark in marks.items())


def dash(value: float, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "–" if value != value else f"{value:.{digits}f}"
