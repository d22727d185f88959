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
from typing import Any
from xml.etree import ElementTree

import openvino as ov
import torch

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.graphs.core import core

_PRECISION = "INFERENCE_PRECISION_HINT"
PIPELINES = ("REP", "REG", "NONE")
ATTENTION = ("PYRAMID", "STATIC")
DECODING = ("FAST_COMPILE", "BEST_PERF")
_CONFIG = {"NPU_USE_NPUW": "YES", "NPUW_DEVICES": "CPU", "NPUW_F16IC": "NO"}


@dataclass(frozen=True)
class Plan:
    """The groups in their order, each by the tag of what it repeats, `""` where it repeats nothing.

    `handed`: the operations whose tensors leave a group, by their names in the graph.
    """

    groups: tuple[str, ...]
    handed: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Of a file that NPUW wrote (`NPUW_ONLINE_DUMP_PLAN`). Raises `InputError` where it is missing or holds no groups."""
        if not path.exists():
            raise InputError(f"{path}: expected the plan that NPUW leaves, found none; empty its folder and compile again")
        groups = ElementTree.parse(path).getroot().findall("./partitioning/group")
        if not groups:
            raise InputError(f"{path}: expected NPUW's groups, found none; compile the graph again")
        handed = (output.get("name", "") for group in groups for output in group.findall("output"))
        return cls(tuple(group.get("repeated", "") for group in groups), tuple(handed))

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
        """How many groups in a row are alike, or repeat nothing: `1 + 22 + 1`; `23·(1 + 1)` where two take turns."""
        runs = [(tag, len(list(run))) for tag, run in groupby(self.groups)]
        said = []
        while runs:
            pairs = 1
            while runs[:2] == runs[2 * pairs : 2 * pairs + 2] and len(runs) >= 2:
                pairs += 1
            counts = [str(count) for _, count in runs[: 2 if pairs > 1 else 1]]
            said.append(f"{pairs}·({' + '.join(counts)})" if pairs > 1 else counts[0])
            runs = runs[2 * pairs if pairs > 1 else 1 :]
        return " + ".join(said)


def compile_npuw(
    graph: ov.Model, *, pipeline: str, fold: bool = True, plan: Path | None = None, dump: Path | None = None
) -> tuple[ov.CompiledModel, Plan | None]:
    """The graph by NPUW on the CPU device, in float32, and how it was partitioned; None where `plan` was given.

    `pipeline`: one of `PIPELINES`, NPUW_ONLINE_PIPELINE. `fold`: of groups that repeat one body is compiled, and not each.
    `dump`: where the plan is written; a `plan` written so partitions the same graph without another search. Raises `InputError`
    where OpenVINO's NPU plugin is missing or refuses the graph.

    Check the output where `fold` is false, as `+exp=study_ir_reuse` does: OpenVINO 2026.4 then computes the converted graph
    right, and that of `layers.one_graph` wrong.
    """
    checks.one_of("pipeline", pipeline, PIPELINES)
    config = _CONFIG | {"NPUW_FOLD": "YES" if fold else "NO"}
    with tempfile.TemporaryDirectory() as folder:
        dump = dump or Path(folder) / "plan.xml"
        if plan is not None:
            return _compiled(graph, config | {"NPUW_PLAN": str(plan)}), None
        config |= {"NPUW_ONLINE_PIPELINE": pipeline, "NPUW_ONLINE_DUMP_PLAN": str(dump)}
        return _compiled(graph, config), Plan.read(dump)


def compile_npuw_llm(
    graph: ov.Model,
    *,
    prompt: int,
    response: int,
    pipeline: str,
    chunk: int | None = None,
    attention: str = "PYRAMID",
    decoding: str = "FAST_COMPILE",
    cache: Path | None = None,
) -> tuple[ov.CompiledModel, dict[str, Plan]]:
    """A decoder by NPUW's LLM mode on the CPU device, and how each of its graphs was cut.

    `graph` is its LLM form with `eager` attention (`whole.llm_graph`), and is left as it was.

    NPUW makes two static graphs of it: `prefill` for prompts of up to `prompt` tokens, in chunks of `chunk` tokens, a power of
    two, or None for the whole prompt at once; and `decode` for up to `response` tokens after them. The output layer is a third.
    Each of the two is partitioned. `attention`, of `ATTENTION`: what chunks of a prompt attend to, the keys up to theirs or, by
    STATIC, always room for all of the prompt's (NPUW_LLM_PREFILL_ATTENTION_HINT). `decoding`, of `DECODING`: BEST_PERF leaves its
    graph whole, whatever the pipeline (NPUW_LLM_GENERATE_HINT). `cache`: a folder of this graph's own for what is compiled, from
    which the same call then reads it, weights and all (CACHE_DIR), and for the plans. Raises `InputError` as `compile_npuw` does.
    """
    checks.one_of("pipeline", pipeline, PIPELINES)
    checks.integer("prompt", prompt, least=1)
    checks.integer("response", response, least=1)
    checks.one_of("attention", attention, ATTENTION)
    checks.one_of("decoding", decoding, DECODING)
    if attention == "STATIC" and chunk is None:
        raise InputError("attention: expected PYRAMID where a prompt is one chunk, whose keys do not grow, got STATIC; set chunk")
    config = _CONFIG | {
        "NPUW_LLM": "YES", "NPUW_LLM_MAX_PROMPT_LEN": str(prompt), "NPUW_LLM_MIN_RESPONSE_LEN": str(response), _PRECISION: "f32",
        "KV_CACHE_PRECISION": "f32", "NPUW_LLM_PREFILL_ATTENTION_HINT": attention, "NPUW_LLM_GENERATE_HINT": decoding,
    }  # fmt: skip
    if chunk is None:
        config["NPUW_LLM_PREFILL_HINT"] = "STATIC"
    elif checks.integer("chunk", chunk, least=1) & (chunk - 1):
        raise InputError(f"chunk: expected a power of two, which NPUW's LLM mode needs, got {chunk}")
    else:
        config["NPUW_LLM_PREFILL_CHUNK_SIZE"] = str(chunk)
    with tempfile.TemporaryDirectory() as folder:
        # In the same place the second time, since the path of a plan is part of what OpenVINO's cache goes by.
        name = f"{pipeline}-{prompt}-{response}-{chunk or prompt}-{attention}-{decoding}"
        dumps = {phase: (cache or Path(folder)) / f"{phase}-{name}.xml" for phase in ("prefill", "decode")}
        # By default no weights are cached, and what is read is a graph without any where no other holds them (2026.4).
        config |= {"CACHE_DIR": str(cache), "CACHE_MODE": "OPTIMIZE_SPEED"} if cache else {}
        for half, dump in zip(("PREFILL", "GENERATE"), dumps.values(), strict=True):
            searched = {} if half == "GENERATE" and decoding == "BEST_PERF" else {"NPUW_ONLINE_PIPELINE": pipeline}
            config[f"++NPUW_LLM_{half}_CONFIG"] = searched | {"NPUW_ONLINE_DUMP_PLAN": str(dump)}
        compiled = _compiled(graph.clone(), config)
        return compiled, {phase: Plan.read(dump) for phase, dump in dumps.items()}


def _compiled(graph: ov.Model, config: dict[str, Any]) -> ov.CompiledModel:
    try:
        with _float32_on_the_cpu():
            return core().compile_model(graph, "NPU", config)
    except RuntimeError as error:
        raise InputError(f"NPUW: OpenVINO compiled nothing ({str(error).strip().splitlines()[-1]}); use another form") from error


@contextmanager
def _float32_on_the_cpu() -> Iterator[None]:
    """NPUW hands neither precision nor threads on to the device, and a CPU with bfloat16 products would take them."""
    wanted = {_PRECISION: "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    before = {name: core().get_property("CPU", name) for name in wanted}
    core().set_property("CPU", wanted)
    try:
        yield
    finally:
        core().set_property("CPU", before)
