"""The graphs that a device is tried with before it is taken: of the forms and launches that the run asks of it, on few keys."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shadowattn.device_check import SMALLEST, Case
from shadowattn.graphs import GraphForm, GraphShape
from shadowattn.graphs.estimation import inputs_for
from shadowattn.graphs.planner import ShapePlan, plan_shapes, with_top_k
from shadowattn.types import Requant

if TYPE_CHECKING:
    from experiments.lab import Lab

# Keys that tell a ranking, and the share of them that a graph selects; the dimension where a run has no model to take it from.
_KEYS, _SHARE, _DIM = 512, 0.2, 64
# How scores become INT8: those of normal values then neither vanish nor are clipped often.
_REQUANT_VALUE = {"target_requant": 3e-3, "fixed_output": 0.36}


def probes(lab: "Lab", device: str) -> dict[str, Case]:
    """By what each is: a graph of every form and every number of heads that share a launch."""
    if "graphs" not in lab.needs:
        return {"a small INT8 graph": SMALLEST}
    return {_words(shape, form): (shape, form) for form in _forms(lab, device) for shape in _shapes(lab, form)}


def _forms(lab: "Lab", device: str) -> Iterator[GraphForm]:
    """The form that estimates, and those that select for the run's methods."""
    graphs = lab.of("graphs")
    requant = None if graphs.output == "float" else Requant(graphs.output, _REQUANT_VALUE.get(graphs.output, 1.0))
    estimate = GraphForm(inputs_for(graphs.inputs, device), requant)
    yield estimate
    selections = [one for one in lab.selections if one.place == "device"] if "estimator" in lab.needs else []
    for pool in dict.fromkeys((selection.query_block, selection.key_block) for selection in selections):
        yield replace(estimate, mask=True, pool=pool, indices=True)


def _shapes(lab: "Lab", form: GraphForm) -> tuple[GraphShape, ...]:
    graphs, step = lab.of("graphs"), math.lcm(*form.pool)
    heads, kv_heads, dim = 1, 1, _DIM
    if "model" in lab.needs:
        heads, kv_heads, dim = lab.shape.heads, lab.shape.kv_heads, lab.shape.head_dim
    rows, keys = (-(-count // step) * step for count in (graphs.chunk_tokens, max(_KEYS, graphs.chunk_tokens)))
    shapes = plan_shapes(
        ShapePlan((rows,), (keys,), 0.0, "single"), heads=heads, kv_heads=kv_heads, head_dim=dim,
        launch_heads=tuple(graphs.launch_heads), fold=graphs.fold,
    )  # fmt: skip
    return with_top_k(shapes, [_SHARE], key_block=form.pool[1]) if form.indices else shapes


def _words(shape: GraphShape, form: GraphForm) -> str:
    blocks = f" in blocks of {form.pool[0]} × {form.pool[1]}" if form.pool != (1, 1) else ""
    selects = f", which selects{blocks}," if form.indices else ""
    return f"an INT8 graph of {shape.heads} heads with inputs={form.inputs}{selects}"
