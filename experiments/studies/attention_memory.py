"""Peak memory of every way there is to compute a chunk's attention."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from experiments.own_process import peak_bytes
from experiments.random_layers import Case, Tensors
from experiments.studies import attention_candidates as candidates
from experiments.studies.attention_candidates import Call
from shadowattn.graphs import GraphBank
from shadowattn.graphs.planner import ShapePlan, plan_shapes
from shadowattn.graphs.symmetric_int8 import absmax_scales
from shadowattn.kernels import Kernels
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.decode import shared_decode
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.latency import Latency, LatencyProfile
from shadowattn.online.latency_profiler import LatencyProfiler
from shadowattn.online.pipeline import MODES, Pipeline
from shadowattn.online.plan import Plan, Work
from shadowattn.online.selection import BLOCK_SCORES, Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.threads import thread_budget
from shadowattn.types import RetentionProfile, ScaleGrid

_EVERY = (*candidates.ESTIMATORS, "hierarchical")
# In which stages go head by head. The others choose keys themselves, so that there are no launches to group.
_PIPELINES = {"int8_graph": MODES[1:]} | dict.fromkeys(("int8_fused", "hierarchical"), ("serial", "overlap"))
_OF_BANK = "total (int8_graph), per row, a bank's graphs"
_DECODE = "decode step (int8_fused), shared list"


def every_path(block: int) -> dict[str, Callable[[Tensors], Call]]:
    """What makes each path that gives the output of attention, by its name.

    Dense attention. Lists of one row, also after a first look, and of `block` rows by every score, by the native kernels. Some of
    these by torch's kernels, in modes in which stages go head by head, and by a bank's graphs. A step of decoding.
    """
    paths: dict[str, Callable[[Tensors], Call]] = {
        name: lambda t, name=name: candidates.baselines(t)[name] for name in candidates.BASELINES
    }
    kinds = [(1, BLOCK_SCORES[0], estimator) for estimator in _EVERY]
    kinds += [(block, score, estimator) for score in BLOCK_SCORES for estimator in candidates.ESTIMATORS]
    for rows, score, estimator in kinds:
        name = candidates.total_name(estimator, rows, score)
        paths[name] = lambda t, name=name, how=(rows, score, (estimator,)): candidates.totals(t, *how)[name]
    for rows, score, estimator in [*kinds[: len(_EVERY)], (block, "probability", "int8_fused")]:
        how = partial(_path, estimator=estimator, rule=Rule(rows, score), kernels=TorchKernels())
        paths[f"{candidates.total_name(estimator, rows, score)}, torch kernels"] = how
    for estimator, modes in _PIPELINES.items():
        for mode in modes:
            paths[f"total ({estimator}), per row, pipeline {mode}"] = partial(_path, estimator=estimator, mode=mode)
    paths[_OF_BANK] = partial(_bank_path, mode="batched")
    for mode in _PIPELINES["int8_graph"]:
        paths[f"{_OF_BANK}, pipeline {mode}"] = partial(_bank_path, mode=mode)
    paths[f"{_OF_BANK}, a third of their rows, pipeline overlap"] = partial(_bank_path, mode="overlap", of=3)
    return paths | {_DECODE: _decode}


def peak_beyond_output(path: str, case: Case, block: int) -> int:
    """Bytes that one of `every_path` needs at most beyond q, k, v and the output, with all that it prepares: packed keys,
    compiled graphs, or the baseline's mask. In a fresh process."""
    case, make = replace(case, rows=1) if path == _DECODE else case, every_path(block)[path]
    make(Tensors(replace(case, keys=min(case.keys, 1024))))()  # libraries and kernels load on first use
    t = Tensors(case)
    return max(0, peak_bytes(lambda: make(t)()) - t.q.numel() * t.q.element_size())


def _path(t: Tensors, *, estimator: str, rule: Rule | None = None, kernels: Kernels | None = None, mode: str = "batched") -> Call:
    made = Int8Tensor() if estimator == "int8_graph" else candidates.fused(t, estimator)
    return _attend(t, made, rule or Rule(), kernels or NativeKernels(), mode)


def _bank_path(t: Tensors, *, mode: str, of: int = 1) -> Call:
    """By graphs of one pair of scales, compiled ahead, for launches of as many heads as a configuration has by default.

    `of`: the last 1 / `of` of the chunk's rows alone, for which the graphs have room that stays empty.
    """
    heads, rows, dim = t.q.shape
    scales = ScaleGrid(*((float(absmax_scales(x).max()),) for x in (t.q, t.k)))
    profile = RetentionProfile(((t.case.retention,) * heads,), scales, dim, "", t.case.shape, "")
    plan = ShapePlan((rows,), (t.case.keys,), 0.0, "single")
    shapes = plan_shapes(plan, heads=heads, kv_heads=len(t.k), head_dim=dim, launch_heads=(1, 2, 4))
    bank, alike = GraphBank.build(profile, shapes), "overlap" if mode == "planned" else mode
    with thread_budget(Pipeline(alike).budgets("CPU").estimate):  # a run, too, compiles for the stage's threads
        bank.compile()
    return _attend(_Fewer(t, rows // of), Int8Graph(bank), Rule(), NativeKernels(), mode)


class _Fewer:
    """The last rows of a chunk."""

    def __init__(self, t: Tensors, rows: int):
        self.case, self.q, self.k, self.v, self.retention, self.scale = t.case, t.q[:, -rows:], t.k, t.v, t.retention, t.scale

    def chunk(self) -> Chunk:
        return Chunk.of(self.q, self.k, self.v, retention=self.retention, scale=self.scale)


def _attend(t: "Tensors | _Fewer", estimator: Estimator, rule: Rule, kernels: Kernels, mode: str) -> Call:
    parts = Parts(estimator, rule, kernels)
    pipeline = _planned(t, parts) if mode == "planned" else Pipeline(mode)
    return lambda: pipeline.run(Stages(t.chunk(), parts), keep_lists=False)


def _planned(t: "Tensors | _Fewer", parts: Parts) -> Pipeline:
    """The mode in which a scheduler orders heads: one that asks for all scores at once, with costs that it does not look at."""
    heads, rows, dim = t.q.shape
    threads, bank, keys = Pipeline("overlap").budgets("CPU"), parts.estimator.graphs, t.case.keys
    of = LatencyProfiler(heads, len(t.k), dim, rows, t.q.dtype, parts.estimator, parts.rule, parts.kernels, threads)
    bucket, capacity = (-1, 0) if bank is None else (0, keys)
    costs = [Latency("estimate", size, bucket, capacity, 1.0, keys, 1.0, 1.0, 1.0, 1) for size in of.sizes(keys)]
    costs += [Latency(stage, 1, -1, 0, t.case.retention, keys, 1.0, 1.0, 1.0, 1) for stage in ("select", "attend")]
    return Pipeline("planned", threads=threads, scheduler=_InTurns(), profile=LatencyProfile(of.binding(), tuple(costs)))


class _InTurns:
    """The first head of every launch, then the second. Scores of all launches are there at once, unless they are so large that
    the pipeline keeps the heads of a launch together."""

    def plan(self, work: Work) -> Plan:
        turns = zip_longest(*(launch.heads for launch in work.launches))
        return Plan(tuple(range(len(work.launches))), tuple(head for turn in turns for head in turn if head is not None))


def _decode(t: Tensors) -> Call:
    return lambda: shared_decode(t.chunk(), Parts(Int8Fused.of(t.q, t.k), Rule(), NativeKernels()))
