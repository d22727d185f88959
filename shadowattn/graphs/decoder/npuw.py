"""NPUW, the NPU plugin's partitioner: what it makes of a static graph, on the CPU device where there is no NPU.

It groups a graph's operations, looks for groups that repeat, and compiles one body for those, which it calls with other weights.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import openvino as ov

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.graphs.core import core

_PRECISION = "INFERENCE_PRECISION_HINT"
PIPELINES = ("REP", "REG", "NONE")


@dataclass(frozen=True)
class Plan:
    """The groups in their order, each by the tag of what it repeats, `""` where it repeats nothing; `outputs` of all groups."""

    groups: tuple[str, ...]
    outputs: int

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Of a file that NPUW wrote (`NPUW_ONLINE_DUMP_PLAN`). Raises `InputError` where it holds no groups."""
        groups = ElementTree.parse(path).getroot().findall("./partitioning/group")
        if not groups:
            raise InputError(f"{path}: expected NPUW's groups, found none; compile the graph again")
        return cls(tuple(group.get("repeated", "") for group in groups), sum(len(group.findall("output")) for group in groups))

    @property
    def calls(self) -> int:
        """Of graphs, in a step."""
        return len(self.groups)

    @property
    def graphs(self) -> int:
        """That are compiled where bodies that repeat are folded."""
        counts = Counter(self.groups)
        return counts[""] + len(counts.keys() - {""})

    def described(self) -> str:
        """How many groups follow one another that repeat one body, or none: `1 + 22 + 1`."""
        return " + ".join(str(len(list(run))) for _, run in groupby(self.groups))


def compile_npuw(
    graph: ov.Model, *, pipeline: str, plan: Path | None = None, dump: Path | None = None
) -> tuple[ov.CompiledModel, Plan | None]:
    """The graph by NPUW on the CPU device, in float32, and how it was partitioned; None where it stays whole or `plan` was given.

    `pipeline`: one of `PIPELINES`, NPUW_ONLINE_PIPELINE; groups that repeat are folded. `dump`: where the plan is written; a
    `plan` written so partitions the same graph without another search. Raises `InputError` where OpenVINO's NPU plugin is missing
    or refuses the graph.
    """
    checks.one_of("pipeline", pipeline, PIPELINES)
    config = {"NPU_USE_NPUW": "YES", "NPUW_DEVICES": "CPU", "NPUW_F16IC": "NO", "NPUW_FOLD": "YES"}
    searches = plan is None and pipeline != "NONE"
    with tempfile.TemporaryDirectory() as folder:
        dump = dump or Path(folder) / "plan.xml"
        config |= {"NPUW_PLAN": str(plan)} if plan else {"NPUW_ONLINE_PIPELINE": pipeline}
        config |= {"NPUW_ONLINE_DUMP_PLAN": str(dump)} if searches else {}
        try:
            with _float32_on_the_cpu():
                compiled = core().compile_model(graph, "NPU", config)
        except RuntimeError as error:
            raise InputError(
                f"NPUW: OpenVINO compiled nothing ({str(error).strip().splitlines()[-1]}); use another form"
            ) from error
        return compiled, Plan.read(dump) if searches else None


@contextmanager
def _float32_on_the_cpu() -> Iterator[None]:
    """NPUW hands no precision on to the device, and a CPU with bfloat16 products would take them."""
    before = core().get_property("CPU", _PRECISION)
    core().set_property("CPU", {_PRECISION: "f32"})
    try:
        yield
    finally:
        core().set_property("CPU", {_PRECISION: before})
