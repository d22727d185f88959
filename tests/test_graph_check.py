"""Whole graphs on a device beside the CPU: right there, and honest about one that fails, dies or computes something else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from shadowattn import graph_check, isolated
from shadowattn.graph_check import GraphFile, check_graphs, run_graph
from shadowattn.graphs import GraphShape
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import cpu_hints
from shadowattn.graphs.npu.graphs import LAYOUTS, attention_graph
from tests.test_device_check import dying

SHAPE = GraphShape(2, 8, 64, 32)


def saved(folder: Path, model: ov.Model, case: str = "a graph") -> GraphFile:
    path = folder / f"{len(list(folder.iterdir()))}.xml"
    ov.save_model(model, path, compress_to_fp16=False)
    return GraphFile(case, str(path))


def times(factor: float) -> ov.Model:
    x = op.parameter([4, 4], ov.Type.f32)
    return ov.Model([op.result(op.multiply(x, op.constant(np.float32(factor))))], [x], "times")


@pytest.mark.parametrize("model", [LAYOUTS["int8 in, float16 out"](SHAPE), attention_graph(SHAPE, int8=False)])
def test_the_cpu_is_close_to_itself(tmp_path, model):
    outcome = run_graph("CPU", saved(tmp_path, model))
    assert outcome.error == ""
    assert outcome.difference < 1e-6
    assert outcome.p95_ms >= outcome.median_ms > 0


def test_a_blob_is_imported_and_not_compiled(tmp_path):
    """One of another graph shows which of the two ran."""
    graph, blob = saved(tmp_path, times(2.0)), tmp_path / "blob"
    blob.write_bytes(core().compile_model(times(3.0), "CPU", cpu_hints()).export_model().getvalue())
    assert run_graph("CPU", graph).difference == 0
    assert run_graph("CPU", replace(graph, blob=str(blob))).difference == pytest.approx(0.5)


def test_the_cpu_that_others_are_held_to_computes_integers_exactly(tmp_path):
    """Also on processors whose INT8 products saturate: the largest integers."""
    model = LAYOUTS["int8 in, float16 out"](SHAPE)
    q, k = (np.full(tuple(port.get_shape()), 127, np.int8) for port in model.inputs)
    (scores,) = graph_check._on_cpu(model, [q, k])
    assert (np.abs(scores - scores.flat[0]) == 0).all()
    smaller = graph_check._on_cpu(model, [q // 127, k])[0]
    np.testing.assert_allclose(scores, 127 * smaller, rtol=2e-3)  # float16


def test_a_device_that_is_not_there_says_so(tmp_path):
    outcome = run_graph("XPU", saved(tmp_path, times(2.0)))
    assert "XPU" in outcome.error
    assert outcome.difference != outcome.difference


def test_graphs_run_in_a_process_apart_and_one_that_dies_is_reported(tmp_path, monkeypatch):
    graphs = [saved(tmp_path, times(factor), f"times {factor}") for factor in (2.0, 3.0)]
    assert [(o.case, o.error, o.difference) for o in check_graphs("CPU", graphs)] == [("times 2.0", "", 0), ("times 3.0", "", 0)]
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(isolated.sys, "executable", dying(tmp_path / "other"))
    outcomes = check_graphs("CPU", graphs)
    assert all("ended with status -6" in outcome.error for outcome in outcomes)


def test_an_output_of_zeros_is_compared_by_its_size():
    zeros, ones = [np.zeros(4, np.float32)], [np.ones(4, np.float32)]
    assert graph_check._difference(zeros, zeros) == 0
    assert graph_check._difference(ones, zeros) == 2
