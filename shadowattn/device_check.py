"""Does a device compile and run the estimation graphs, and are its integers right? Each form by itself, in another process.

`python -m shadowattn.device_check DEVICE CASE …`, each case a JSON object, prints one JSON line a case. It runs apart because a
device's compiler may abort rather than raise.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import cpu_hints, multiplies_exactly, runs_in_int8
from shadowattn.graphs.estimation import FLOAT, GraphForm, estimation_graph, form_of
from shadowattn.graphs.graph import Arena, Graph
from shadowattn.graphs.symmetric_int8 import quantise
from shadowattn.interleave import repeated
from shadowattn.isolated import run_apart
from shadowattn.types import Requant

_CHUNK = GraphShape(4, 128, 64, 1024)
_REQUANT = Requant("target_requant", 3e-3)
_RUNS, _LONG_S, _RETENTION = 30, 2.0, 0.2
_LEAST_RECALL = 0.98
# Where sums of products grow largest: hardware that saturates them is found out.
POSITIVE = "static, positive values"
# Of normal values: their absmax over a head is near four.
_SCALE = 4.2 / 127
_HALF_ROUNDING = 2.0**-11

Case = tuple[GraphShape, GraphForm]
SMALLEST: Case = (GraphShape(1, 16, 64, 16), FLOAT)

CASES: dict[str, Case] = {
    "smallest": SMALLEST,
    "static": (_CHUNK, FLOAT),
    "static, long": (replace(_CHUNK, keys=4096), FLOAT),
    POSITIVE: (_CHUNK, FLOAT),
    "static, INT8 scores": (_CHUNK, GraphForm(requant=_REQUANT)),
    "static, group folded": (replace(_CHUNK, group=4), FLOAT),
    "static, mask": (_CHUNK, GraphForm(mask=True)),
    "static, mask, pool 1×16": (_CHUNK, GraphForm(mask=True, pool=(1, 16))),
    "static, mask, pool 1×16, TopK 13": (replace(_CHUNK, top_k=13), GraphForm(mask=True, pool=(1, 16), indices=True)),
    "static, mask, TopK 205": (replace(_CHUNK, top_k=205), GraphForm(mask=True, indices=True)),
    "runtime scales": (_CHUNK, GraphForm("runtime")),
    "unit, int8 inputs": (_CHUNK, GraphForm("unit")),
    "int8, float16 scores": (_CHUNK, GraphForm("int8")),
    "int8, float16 scores, long": (replace(_CHUNK, keys=4096), GraphForm("int8")),
    "int8, INT8 scores": (_CHUNK, GraphForm("int8", _REQUANT)),
    "int8, group folded": (replace(_CHUNK, group=4), GraphForm("int8")),
    "int8, mask": (_CHUNK, GraphForm("int8", mask=True)),
    "int8, mask, TopK 205": (replace(_CHUNK, top_k=205), GraphForm("int8", mask=True, indices=True)),
    "int8, mask, pool 1×16, TopK 13": (replace(_CHUNK, top_k=13), GraphForm("int8", mask=True, pool=(1, 16), indices=True)),
    # The paper's launches: 2, 3 and 4 ms on its phone (section 3.4).
    "launch of 1 head": (GraphShape(1, 128, 64, 2048), FLOAT),
    "launch of 2 heads": (GraphShape(2, 128, 64, 2048), FLOAT),
    "launch of 4 heads": (GraphShape(4, 128, 64, 2048), FLOAT),
}


@dataclass(frozen=True)
class Outcome:
    """What one case came to. `error` is empty where it ran; the figures are NaN where it did not.

    `steps_off`: largest difference to integer arithmetic, in steps of the integer product (of the score, where that is INT8; of
    rows with other indices, where the graph selects). `exact`: share of scores without any. `recall`: of the top 20 % of
    each row by integer arithmetic. `int8`: whether the runtime names an INT8 primitive, None where it names none. `runs`: how
    many were timed.
    """

    case: str
    error: str = ""
    compile_s: float = float("nan")
    median_ms: float = float("nan")
    p95_ms: float = float("nan")
    steps_off: float = float("nan")
    exact: float = float("nan")
    recall: float = float("nan")
    int8: bool | None = None
    runs: int = 0

    @property
    def ranks(self) -> bool:
        """Whether it ran and kept the keys of integer arithmetic, but for what INT8 scores round: 0.989 on the CPU device."""
        return not self.error and self.recall >= _LEAST_RECALL


def run_case(device: str, case: str, what: Case) -> Outcome:
    """Compiles, runs, compares and times one case in this process. Whatever the device raises becomes the outcome's `error`."""
    shape, form = what
    hints = cpu_hints() if device == "CPU" else {}
    whole = device == "CPU" and not multiplies_exactly()
    try:
        start = time.perf_counter()
        model = core().compile_model(estimation_graph(shape, form, _SCALE, _SCALE, whole=whole), device, hints)
        compile_s = time.perf_counter() - start
        graph = Graph(model, shape, form, (_SCALE, _SCALE), Arena([model]))
        generator = torch.Generator().manual_seed(0)
        q = _normal(shape.heads, shape.rows, shape.head_dim, generator)
        k = _normal(shape.kv_heads, shape.keys, shape.head_dim, generator)
        if case == POSITIVE:
            q, k = q.abs(), k.abs()
        scales = {"q_scales": torch.full((len(q),), _SCALE), "k_scales": torch.full((len(k),), _SCALE)}
        out = graph.run(q, k, **scales, first_position=shape.keys - shape.rows).clone()
        seconds = repeated(graph.infer, most=_RUNS, most_s=_LONG_S)
    except RuntimeError as error:  # what OpenVINO raises, for whatever reason
        return Outcome(case, error=" ".join(str(error).split())[-300:])
    median, p95 = np.percentile(seconds, (50, 95)) * 1e3
    q8, k8 = (quantise(x, scales[name]).double() for name, x in (("q_scales", q), ("k_scales", k)))
    product = q8 @ k8.repeat_interleave(shape.group, 0).mT
    figures = _compare(out, product, shape, form)
    int8 = runs_in_int8(model) if device == "CPU" else None
    return Outcome(case, "", compile_s, float(median), float(p95), *figures, int8, len(seconds))


def _normal(heads: int, rows: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Normal values off the borders between two steps, which a device may round either way."""
    steps = (torch.randn(heads, rows, dim, generator=generator) / _SCALE).round()
    return (steps + 0.6 * torch.rand(heads, rows, dim, generator=generator) - 0.3) * _SCALE


def check_device(device: str, cases: Mapping[str, Case] = CASES, *, progress: Callable = iter) -> list[Outcome]:
    """All cases on one device. A case that takes the process down is reported with its exit status, and the rest still run."""
    given = [{"case": name, "shape": asdict(shape), "form": asdict(form)} for name, (shape, form) in cases.items()]
    return [Outcome(**outcome) for outcome in run_apart("shadowattn.device_check", device, given, progress=progress)]


def _compare(out: torch.Tensor, product: torch.Tensor, shape: GraphShape, form: GraphForm) -> tuple[float, float, float]:
    """(steps_off, exact, recall) of an output against the exact integer product [heads, rows, keys]."""
    positions = shape.keys - shape.rows + torch.arange(shape.rows)
    if form.mask:
        product = product.masked_fill(torch.arange(shape.keys) > positions[:, None], -torch.inf)
    rows, keys = form.pool
    exact = product.view(len(product), shape.rows // rows, rows, shape.keys // keys, keys).amax((2, 4))
    seen = torch.isfinite(exact)
    if form.indices:
        expected = torch.sort(exact, dim=2, descending=True, stable=True).indices[..., : shape.top_k]
        hits = torch.stack([torch.isin(o, e) for o, e in zip(out.flatten(0, 1).long(), expected.flatten(0, 1), strict=True)])
        differ = (out.long() != expected).any(2)
        return float(differ.sum()), 1 - float(differ.double().mean()), float(hits.double().mean())
    steps = out.double()
    if form.requant is not None:
        exact = (exact * form.requant.multiplier(_SCALE, _SCALE)).clamp(-128, 127)
    elif form.bakes_scales:
        steps = steps / float(np.float64(np.float32(_SCALE)) ** 2)
    else:
        steps = steps * form.score_steps
    off = (steps - exact)[seen].abs()
    if form.score_dtype is np.float16:  # eleven bits: half of the last one is no error
        off = (off - exact[seen].abs() * _HALF_ROUNDING).clamp(min=0).round()
    else:  # an INT8 score is a rounding of the exact one; half a step is no error
        off = (off - 0.501).clamp(min=0).ceil() if form.requant is not None else off.round()
    keep = max(1, round(_RETENTION * exact.shape[2]))
    best, picks = (x.masked_fill(~seen, -torch.inf).topk(keep, 2).indices.flatten(0, 1) for x in (exact, steps))
    hit = sum(len(np.intersect1d(a, b)) for a, b in zip(best.numpy(), picks.numpy(), strict=True))
    return float(off.max()), float((off == 0).double().mean()), hit / best.numel()


if __name__ == "__main__":
    for given in map(json.loads, sys.argv[2:]):
        of = GraphShape(**given["shape"]), form_of(given["form"])
        print(json.dumps(asdict(run_case(sys.argv[1], given["case"], of))), flush=True)
