"""The graphs that `+exp=study_ir_reuse` compares: each built and compiled of one random decoder, and run on the same step."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path

import numpy as np
import openvino as ov
import torch
from transformers import PreTrainedModel

from shadowattn.graphs.core import core
from shadowattn.graphs.decoder.layers import OUT, StepSizes, fixed_names, loop_graph, one_graph, shared_graph, step_tensors
from shadowattn.graphs.decoder.npuw import Plan, compile_npuw, compile_npuw_llm
from shadowattn.graphs.decoder.passes import LastTokenSlice, rewritten
from shadowattn.graphs.decoder.whole import BEAM, INPUTS, LLM_INPUTS, LOGITS, llm_graph, whole_graph
from shadowattn.models import load_random
from shadowattn.models.decoder import read_decoder

_VOCABULARY = 4096  # of the random models: their output layer is not what is compared
_FLOAT32_STATE = {"KV_CACHE_PRECISION": "f32"}
RESPONSE = 64  # tokens of decoding that NPUW's LLM mode has room for


@dataclass(frozen=True)
class Step:
    """A step of decoding, or of a prefill chunk of `chunk` tokens, behind `past` earlier ones, of a random decoder."""

    shape: str
    layers: int
    hidden: int | None
    phase: str
    chunk: int
    past: int

    @property
    def rows(self) -> int:
        return 1 if self.phase == "decode" else self.chunk

    @property
    def prompt(self) -> int:
        """Tokens of a prompt with the chunk at its end."""
        return self.past + self.chunk


@dataclass(frozen=True)
class Run:
    """One call of a step, and what has to be done `before` it, which is no part of it.

    `first`: seconds of a first decoding step behind a prompt, which finds keys and values where the prompt left them.
    """

    call: Callable[[], np.ndarray]
    before: Callable[[], object] = lambda: None
    first: Callable[[], float] | None = None

    def __call__(self) -> np.ndarray:
        self.before()
        return self.call()


Built = tuple[Run, dict]


@dataclass(frozen=True)
class Parts:
    """What every form is built of: a random model, its layers' weights, and the inputs of a step."""

    step: Step
    model: PreTrainedModel
    sizes: StepSizes
    tensors: list[dict[str, torch.Tensor]]
    common: dict[str, np.ndarray]  # what all layers read
    past: dict[str, np.ndarray]  # `key` and `value` of earlier tokens, of all layers, [L, G, P, D]

    @classmethod
    def of(cls, step: Step) -> "Parts":
        model = load_random(step.shape, layers=step.layers, hidden=step.hidden, vocabulary=_VOCABULARY).model
        decoder = read_decoder(model)
        sizes = StepSizes.of(decoder, rows=step.rows, past=step.past)
        generator, half, positions = np.random.default_rng(0), sizes.head_dim // 2, slice(step.past, step.past + step.rows)
        sin = torch.cat([-decoder.sin[:, :half], decoder.sin[:, half:]], 1)
        cos, sin = (table[positions][None, :, None].numpy() for table in (decoder.cos, sin))
        mask = np.triu(np.full((step.rows, step.past + step.rows), np.finfo(np.float32).min, np.float32), step.past + 1)
        hidden = generator.standard_normal((1, step.rows, decoder.hidden), np.float32)
        common = {"hidden": hidden, "mask": mask[None, None, None], "cos": cos, "sin": sin}
        past = {kind: generator.standard_normal((step.layers, *sizes.cached[1:]), np.float32) for kind in ("key", "value")}
        return cls(step, model, sizes, step_tensors(decoder), common, past)

    def cached(self, layer: int, prefix: str) -> dict[str, np.ndarray]:
        """One layer's earlier keys and values, under the names that a graph has for them."""
        return {f"{prefix}{kind}": x[layer : layer + 1] for kind, x in self.past.items()}

    @cached_property
    def dynamic(self) -> ov.Model:
        """The graph that transformers' model is converted to, for any number of tokens and earlier ones; logits of the last."""
        return rewritten(whole_graph(self.model), LastTokenSlice())

    @cached_property
    def converted(self) -> ov.Model:
        """The same at the step's shapes."""
        graph = self.dynamic.clone()
        graph.reshape({port: list(self.converted_inputs[port.any_name].shape) for port in graph.inputs})
        return fixed_names(graph)

    @cached_property
    def converted_inputs(self) -> dict[str, np.ndarray]:
        """Tokens, and what the layers of the other forms are given too."""
        rows, past = self.sizes.blocks.rows, self.sizes.past
        ids = np.random.default_rng(1).integers(0, _VOCABULARY, (1, rows))
        positions = np.arange(past, past + rows)[None]
        return dict(zip(INPUTS, (ids, self.common["mask"][0], positions), strict=True)) | self.all_cached()

    @cached_property
    def llm(self) -> ov.Model:
        """The same with keys and values as its state, as NPUW's LLM mode takes it, for any number of tokens."""
        return rewritten(llm_graph(self.model, eager=True), LastTokenSlice())

    @cached_property
    def stateful(self) -> ov.Model:
        """The same as openvino-genai takes it."""
        return rewritten(llm_graph(self.model), LastTokenSlice())

    def all_cached(self) -> dict[str, np.ndarray]:
        """Those of all layers, each under its own name."""
        return {name: x for layer in range(len(self.tensors)) for name, x in self.cached(layer, f"past.{layer}.").items()}


def _hints(folder: Path | None) -> dict:
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    return hints | ({"CACHE_DIR": str(folder)} if folder else {})


def _counts(handed: Iterable[ov.Output], *, graphs: int = 1, calls: int = 1, plan: str = "") -> dict:
    """`handed`: what leaves all calls; its bytes are not a number where a shape is not known before the call."""
    handed, nbytes = list(handed), float("nan")
    if not any(port.partial_shape.is_dynamic for port in handed):
        nbytes = float(sum(port.element_type.size * prod(port.shape) for port in handed))
    return {"graphs": graphs, "calls": calls, "outputs": len(handed), "handed_bytes": nbytes, "plan": plan}


def _of_plan(plan: Plan, graph: ov.Model | None = None, *, fold: bool = True) -> dict:
    """By the graph that was cut; no bytes without it, since NPUW's LLM mode cuts graphs of its own, or where it lacks a name."""
    named = {node.get_friendly_name(): node.outputs() for node in graph.get_ops()} if graph else {}
    counts = _counts(
        (port for name in plan.handed for port in named.get(name, ())),
        graphs=plan.graphs if fold else plan.calls,
        calls=plan.calls,
    )
    handed_bytes = counts["handed_bytes"] if named.keys() >= set(plan.handed) else float("nan")
    return counts | {"outputs": len(plan.handed), "handed_bytes": handed_bytes, "plan": plan.described()}


def _runner(compiled: ov.CompiledModel, inputs: dict[str, np.ndarray], output: str) -> Run:
    request = compiled.create_infer_request()
    return Run(lambda: request.infer(inputs, share_inputs=True, share_outputs=True)[output].copy())


def _whole(parts: Parts, folder: Path | None) -> Built:
    compiled = core().compile_model(one_graph(parts.sizes, parts.tensors), "CPU", _hints(folder))
    return _runner(compiled, parts.common | parts.all_cached(), OUT), _counts(compiled.outputs)


def _layers(parts: Parts, folder: Path) -> Built:
    compiled = [core().compile_model(one_graph(parts.sizes, [layer]), "CPU", _hints(folder)) for layer in parts.tensors]
    requests = [model.create_infer_request() for model in compiled]

    def run() -> np.ndarray:
        given = dict(parts.common)
        for layer, request in enumerate(requests):
            out = request.infer(given | parts.cached(layer, "past.0."), share_inputs=True, share_outputs=True)
            given["hidden"] = out[OUT]
        return given["hidden"].copy()

    handed = [port for model in compiled for port in model.outputs]
    return Run(run), _counts(handed, graphs=len(compiled), calls=len(compiled))


def _shared(parts: Parts, folder: Path) -> Built:
    compiled = core().compile_model(shared_graph(parts.sizes, parts.tensors[0]), "CPU", _hints(folder))
    request = compiled.create_infer_request()
    weights = [{name: x.numpy() for name, x in layer.items()} for layer in parts.tensors]

    def run() -> np.ndarray:
        given = dict(parts.common)
        for layer, of_layer in enumerate(weights):
            out = request.infer(given | of_layer | parts.cached(layer, "past."), share_inputs=True, share_outputs=True)
            given["hidden"] = out[OUT].copy()  # the request's own memory, which the next layer writes
        return given["hidden"]

    return Run(run), _counts(compiled.outputs * len(weights), calls=len(weights))


def _loop(parts: Parts, folder: Path) -> Built:
    compiled = core().compile_model(loop_graph(parts.sizes, parts.tensors), "CPU", _hints(folder))
    inputs = parts.common | {f"past.{kind}": x for kind, x in parts.past.items()}
    return _runner(compiled, inputs, OUT), _counts(compiled.outputs)


def trace(form: str, parts: Parts) -> None:
    """Makes what a form compiles of transformers' model; nothing for forms of the layers alone."""
    if form in OF_PROMPTS:
        _ = parts.llm
    elif form == "stateful":
        _ = parts.stateful
    elif form == "dynamic":
        _ = parts.dynamic
    elif form in OF_CONVERTED:
        _ = parts.converted


def base_of(form: str, parts: Parts) -> Run:
    """The whole graph that a form is compared with, on the CPU and compiled without a cache."""
    if form in OF_PROMPTS:
        return _of_prompt(parts, core().compile_model(parts.llm, "CPU", _hints(None) | _FLOAT32_STATE))
    return (_converted if form in OF_CONVERTED else _whole)(parts, None)[0]


def _converted(parts: Parts, folder: Path | None, *, dynamic: bool = False) -> Built:
    compiled = core().compile_model(parts.dynamic if dynamic else parts.converted, "CPU", _hints(folder))
    return _runner(compiled, parts.converted_inputs, LOGITS), _counts(compiled.outputs)


def _npuw(parts: Parts, folder: Path, *, pipeline: str, fold: bool = True) -> Built:
    """The second time, by the plan that the first time left in the folder."""
    kept = folder / "plan.xml"
    earlier = kept if kept.exists() else None
    compiled, plan = compile_npuw(parts.converted, pipeline=pipeline, fold=fold, plan=earlier, dump=kept)
    run = _runner(compiled, parts.converted_inputs, LOGITS)
    return run, _of_plan(plan, parts.converted, fold=fold) if plan else {}


def _stateful(parts: Parts, folder: Path | None) -> Built:
    """On the CPU, for any number of earlier tokens; each step finds the same state."""
    compiled = core().compile_model(parts.stateful, "CPU", _hints(folder) | _FLOAT32_STATE)
    request, ids = compiled.create_infer_request(), parts.converted_inputs[INPUTS[0]]
    earlier = {}
    for place, of_layers in parts.past.items():
        for layer, x in enumerate(of_layers):
            earlier[f"past_key_values.{layer}.{place}present.{layer}.{place}"] = np.ascontiguousarray(x[None])

    def before() -> None:
        for state in request.query_state():
            state.state = ov.Tensor(earlier[state.name])

    inputs = _llm_inputs(ids, parts.step.past + ids.shape[1])
    return Run(lambda: request.infer(inputs)[LOGITS].copy(), before), _counts(compiled.outputs)


def _llm_inputs(ids: np.ndarray, held: int) -> dict[str, np.ndarray]:
    """Of tokens [1, n] that are the last of `held`."""
    values = (ids, np.ones((1, held), np.int64), np.arange(held - ids.shape[1], held)[None])
    return dict(zip(LLM_INPUTS, values, strict=True)) | {BEAM: np.zeros(1, np.int32)}


def _of_prompt(parts: Parts, compiled: ov.CompiledModel) -> Run:
    """Decoding: a token behind a prompt of `past` tokens, and then the next ones. Prefill: the prompt with a chunk at its end."""
    request, step = compiled.create_infer_request(), parts.step
    ids, held = np.random.default_rng(1).integers(0, _VOCABULARY, (1, step.past + max(step.chunk, RESPONSE))), 0

    def prompt() -> np.ndarray:
        return request.infer(_llm_inputs(ids[:, : step.prompt], step.prompt))[LOGITS].copy()

    def token() -> np.ndarray:
        nonlocal held
        if not held:
            request.infer(_llm_inputs(ids[:, : step.past], step.past))
            held = step.past
        held += 1
        return request.infer(_llm_inputs(ids[:, held - 1 : held], held))[LOGITS].copy()

    def first() -> float:
        nonlocal held
        request.reset_state()
        request.infer(_llm_inputs(ids[:, : step.past], step.past))
        held, start = step.past, time.perf_counter()
        token()
        return time.perf_counter() - start

    return Run(token, first=first) if step.phase == "decode" else Run(prompt, request.reset_state)


def _npuw_llm(parts: Parts, folder: Path, *, pipeline: str = "REG", chunked: bool = False, **hints: str) -> Built:
    """Counted are the groups of a call of the phase's own graph: of a decoding step, or of one chunk."""
    step, chunk = parts.step, parts.step.chunk if chunked else None
    compiled, plans = compile_npuw_llm(
        parts.llm, prompt=step.prompt, response=RESPONSE, pipeline=pipeline, chunk=chunk, cache=folder, **hints
    )
    return _of_prompt(parts, compiled), _of_plan(plans[step.phase])


OF_CONVERTED = ("converted", "dynamic", "stateful", "NPUW NONE", "NPUW REG", "NPUW REG unfolded", "NPUW REP")
OF_PROMPTS = (
    *("NPUW LLM", "NPUW LLM REP", "NPUW LLM BEST_PERF"),
    *("NPUW LLM chunked", "NPUW LLM chunked STATIC", "NPUW LLM chunked REP"),
)
# Each makes of the parts, and of a folder for what compiling leaves, a call of one step, and says what the step consists of.
BUILDERS: dict[str, Callable[..., Built]] = {
    "whole": _whole,
    "a graph a layer": _layers,
    "one graph for all": _shared,
    "loop": _loop,
    "converted": _converted,
    "dynamic": partial(_converted, dynamic=True),
    "stateful": _stateful,
    "NPUW NONE": partial(_npuw, pipeline="NONE"),
    "NPUW REG": partial(_npuw, pipeline="REG"),
    "NPUW REG unfolded": partial(_npuw, pipeline="REG", fold=False),
    "NPUW REP": partial(_npuw, pipeline="REP"),
    "NPUW LLM": _npuw_llm,
    "NPUW LLM REP": partial(_npuw_llm, pipeline="REP"),
    "NPUW LLM BEST_PERF": partial(_npuw_llm, decoding="BEST_PERF"),
    "NPUW LLM chunked": partial(_npuw_llm, chunked=True),
    "NPUW LLM chunked STATIC": partial(_npuw_llm, chunked=True, attention="STATIC"),
    "NPUW LLM chunked REP": partial(_npuw_llm, pipeline="REP", chunked=True),
}
