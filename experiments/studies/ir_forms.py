"""The graphs that `+exp=study_ir_reuse` compares: each built and compiled of one random decoder, and run on the same step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import openvino as ov
import torch
from transformers import PreTrainedModel

from shadowattn.graphs.core import core
from shadowattn.graphs.decoder.layers import StepSizes, fixed_names, loop_graph, one_graph, shared_graph, step_tensors
from shadowattn.graphs.decoder.npuw import compile_npuw
from shadowattn.graphs.decoder.whole import INPUTS, LOGITS, whole_graph
from shadowattn.models import load_random
from shadowattn.models.decoder import read_decoder

_VOCABULARY = 4096  # of the random models: their output layer is not what is compared


@dataclass(frozen=True)
class Step:
    """A step of `rows` tokens behind `past` earlier ones, of a random decoder of a published shape."""

    shape: str
    layers: int
    hidden: int | None
    rows: int
    past: int


Run = Callable[[], np.ndarray]
Built = tuple[Run, dict]


@dataclass(frozen=True)
class Parts:
    """What every form is built of: a random model, its layers' weights, and the inputs of a step."""

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
        return cls(model, sizes, step_tensors(decoder), common, past)

    def cached(self, layer: int, prefix: str) -> dict[str, np.ndarray]:
        """One layer's earlier keys and values, under the names that a graph has for them."""
        return {f"{prefix}{kind}": x[layer : layer + 1] for kind, x in self.past.items()}

    @cached_property
    def converted(self) -> ov.Model:
        """The graph that transformers' model is converted to, at the step's shapes."""
        graph = whole_graph(self.model)
        graph.reshape({port: list(self.converted_inputs[port.any_name].shape) for port in graph.inputs})
        return fixed_names(graph)

    @cached_property
    def converted_inputs(self) -> dict[str, np.ndarray]:
        """Tokens, and what the layers of the other forms are given too."""
        rows, past = self.sizes.blocks.rows, self.sizes.past
        ids = np.random.default_rng(1).integers(0, _VOCABULARY, (1, rows))
        positions = np.arange(past, past + rows)[None]
        return dict(zip(INPUTS, (ids, self.common["mask"][0], positions), strict=True)) | self.all_cached()

    def all_cached(self) -> dict[str, np.ndarray]:
        """Those of all layers, each under its own name."""
        return {name: x for layer in range(len(self.tensors)) for name, x in self.cached(layer, f"past.{layer}.").items()}


def _hints(folder: Path | None) -> dict:
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    return hints | ({"CACHE_DIR": str(folder)} if folder else {})


def _counts(graphs: int, calls: int, outputs: int, plan: str = "") -> dict:
    return {"graphs": graphs, "calls": calls, "outputs": outputs, "plan": plan}


def _runner(compiled: ov.CompiledModel, inputs: dict[str, np.ndarray], output: str) -> Run:
    request = compiled.create_infer_request()
    return lambda: request.infer(inputs, share_inputs=True, share_outputs=True)[output].copy()


def _whole(parts: Parts, folder: Path | None) -> Built:
    compiled = core().compile_model(one_graph(parts.sizes, parts.tensors), "CPU", _hints(folder))
    return _runner(compiled, parts.common | parts.all_cached(), "hidden"), _counts(1, 1, len(compiled.outputs))


def _layers(parts: Parts, folder: Path) -> Built:
    compiled = [core().compile_model(one_graph(parts.sizes, [layer]), "CPU", _hints(folder)) for layer in parts.tensors]
    requests = [model.create_infer_request() for model in compiled]

    def run() -> np.ndarray:
        given = dict(parts.common)
        for layer, request in enumerate(requests):
            out = request.infer(given | parts.cached(layer, "past.0."), share_inputs=True, share_outputs=True)
            given["hidden"] = out["hidden"]
        return given["hidden"].copy()

    return run, _counts(len(compiled), len(compiled), sum(len(model.outputs) for model in compiled))


def _shared(parts: Parts, folder: Path) -> Built:
    compiled = core().compile_model(shared_graph(parts.sizes, parts.tensors[0]), "CPU", _hints(folder))
    request = compiled.create_infer_request()
    weights = [{name: x.numpy() for name, x in layer.items()} for layer in parts.tensors]

    def run() -> np.ndarray:
        given = dict(parts.common)
        for layer, of_layer in enumerate(weights):
            out = request.infer(given | of_layer | parts.cached(layer, "past."), share_inputs=True, share_outputs=True)
            given["hidden"] = out["hidden"].copy()  # the request's own memory, which the next layer writes
        return given["hidden"]

    return run, _counts(1, len(weights), len(weights) * len(compiled.outputs))


def _loop(parts: Parts, folder: Path) -> Built:
    compiled = core().compile_model(loop_graph(parts.sizes, parts.tensors), "CPU", _hints(folder))
    inputs = parts.common | {f"past.{kind}": x for kind, x in parts.past.items()}
    return _runner(compiled, inputs, "hidden"), _counts(1, 1, len(compiled.outputs))


def base_of(form: str, parts: Parts) -> Run:
    """The whole graph that a form is compared with, compiled without a cache."""
    return (_converted if form in OF_CONVERTED else _whole)(parts, None)[0]


def _converted(parts: Parts, folder: Path | None) -> Built:
    compiled = core().compile_model(parts.converted, "CPU", _hints(folder))
    return _runner(compiled, parts.converted_inputs, LOGITS), _counts(1, 1, len(compiled.outputs))


def _npuw(parts: Parts, folder: Path, *, pipeline: str) -> Built:
    """The second time, by the plan that the first time left in the folder."""
    kept = folder / "plan.xml"
    compiled, plan = compile_npuw(parts.converted, pipeline=pipeline, plan=kept if kept.exists() else None, dump=kept)
    run = _runner(compiled, parts.converted_inputs, LOGITS)
    if plan is None:
        return run, _counts(1, 1, len(compiled.outputs))
    return run, _counts(plan.graphs, plan.calls, plan.outputs, plan.described())


OF_CONVERTED = ("converted", "NPUW NONE", "NPUW REG", "NPUW REP")
# Each makes of the parts, and of a folder for what compiling leaves, a call of one step, and says what the step consists of.
BUILDERS: dict[str, Callable[..., Built]] = {
    "whole": _whole,
    "a graph a layer": _layers,
    "one graph for all": _shared,
    "loop": _loop,
    "converted": _converted,
    "NPUW NONE": partial(_npuw, pipeline="NONE"),
    "NPUW REG": partial(_npuw, pipeline="REG"),
    "NPUW REP": partial(_npuw, pipeline="REP"),
}
