"""Scores from one compiled graph of a key head and its query heads, whoever quantised it: NNCF's, for one."""

from collections.abc import Mapping
from typing import ClassVar

import openvino as ov
import torch
from torch import Tensor

from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.estimation import INT8_MAX, GraphForm
from shadowattn.graphs.graph import Arena, Graph
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.quantised import integers, value_figures


class FixedGraph(Estimator):
    """`steps`: what the integers of the graph's inputs `q` and `k` stand for, −128 … 127 of them.

    One call at a time: the graph has one set of inputs and outputs, and what is returned is a copy.
    """

    reads_cpu_memory: ClassVar[bool] = True

    def __init__(self, model: ov.CompiledModel, shape: GraphShape, steps: Mapping[str, float]):
        self._graph = Graph(model, shape, GraphForm(), (None, None), Arena([model]))
        self._steps = steps

    def scores(self, chunk: Chunk) -> Tensor:
        q, k = chunk.q.float(), chunk.k.float()
        return torch.cat([self._graph.run(q[part], k[group][None]).clone() for group, part in chunk.heads.grouped()])

    def figures(self, chunk: Chunk, scores: Tensor, visible: Tensor) -> dict[str, float]:
        values = {}
        for name, x in (("q", chunk.q.float()), ("k", chunk.k.float()[chunk.heads.kv])):
            step = torch.full((len(x),), self._steps[name])
            values[name] = x, integers(x, step, INT8_MAX, least=-INT8_MAX - 1), step
        return value_figures(values, INT8_MAX)
