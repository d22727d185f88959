"""Scores from the one graph of a key head and its query heads that NNCF quantised from calibration data."""

from typing import ClassVar

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.graphs.estimation import INT8_MAX, GraphForm
from shadowattn.graphs.graph import Arena, Graph
from shadowattn.graphs.nncf_graph import NNCFGraph
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.quantised import integers, value_figures


class NNCF(Estimator):
    """One range for Q and one for K of all heads and layers, 256 levels each. Chunks up to the graph's rows and keys.

    One call at a time: the graph has one set of inputs and outputs, and what is returned is a copy.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"nncf_graph"})
    reads_cpu_memory: ClassVar[bool] = True

    def __init__(self, nncf_graph: NNCFGraph):
        checks.instance("nncf_graph", nncf_graph, NNCFGraph, "make one with shadowattn.graphs.nncf_graph.compiled_nncf_graph")
        self._graph = Graph(nncf_graph.model, nncf_graph.shape, GraphForm(), (None, None), Arena([nncf_graph.model]))
        self._shape, self._steps, self._made_for = nncf_graph.shape, nncf_graph.steps, nncf_graph.fingerprint

    @property
    def made_for(self) -> str:
        return self._made_for

    def scores(self, chunk: Chunk) -> Tensor:
        shape = self._shape
        if chunk.q.shape[1] > shape.rows or chunk.keys > shape.keys:
            raise InputError(
                f"nncf: the graph is for at most {shape.rows} rows and {shape.keys} keys, got {chunk.q.shape[1]} and "
                f"{chunk.keys}; calibrate it for longer prompts, or use estimator=int8_graph"
            )
        q, k = chunk.q.float(), chunk.k.float()
        return torch.cat([self._graph.run(q[part], k[group][None]).clone() for group, part in chunk.heads.grouped()])

    def figures(self, chunk: Chunk, scores: Tensor, visible: Tensor) -> dict[str, float]:
        values = {}
        for name, x in (("q", chunk.q.float()), ("k", chunk.k.float()[chunk.heads.kv])):
            step = torch.full((len(x),), self._steps[name], dtype=torch.float32)
            values[name] = x, integers(x, step, INT8_MAX, least=-INT8_MAX - 1), step
        return value_figures(values, INT8_MAX)
