"""NPUW's plans, on the CPU device."""

import numpy as np
import pytest

from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.graphs.decoder.layers import StepSizes, one_graph, step_tensors
from shadowattn.graphs.decoder.npuw import Plan, compile_npuw
from shadowattn.models.decoder import read_decoder
from tests.tiny import tiny_model

LAYERS = 8
PLAN = """<?xml version="1.0"?>
<ensemble><partitioning>
<group id="0"><output name="a"/></group>
<group id="1" repeated="R1"><output name="b"/><output name="c"/></group>
<group id="2" repeated="R1"><output name="d"/></group>
<group id="3"><layer name="e"/></group>
</partitioning><repeated><block id="R1"/></repeated></ensemble>"""


@pytest.fixture(scope="module")
def graph():
    decoder = read_decoder(tiny_model(layers=LAYERS))
    return one_graph(StepSizes.of(decoder, rows=1, past=7), step_tensors(decoder))


def test_a_plan_counts_graphs_calls_and_what_leaves_them(tmp_path):
    (tmp_path / "plan.xml").write_text(PLAN)
    plan = Plan.read(tmp_path / "plan.xml")
    assert (plan.calls, plan.graphs, plan.outputs, plan.described()) == (4, 3, 4, "1 + 2 + 1")


def test_a_plan_without_groups_is_refused(tmp_path):
    (tmp_path / "plan.xml").write_text("<ensemble/>")
    with pytest.raises(InputError, match="expected NPUW's groups"):
        Plan.read(tmp_path / "plan.xml")


@pytest.mark.parametrize("pipeline", ["REP", "REG", "NONE"])
def test_npuw_computes_what_the_whole_graph_does(graph, pipeline):
    generator = np.random.default_rng(0)
    inputs = {port.any_name: generator.standard_normal(port.shape, np.float32) for port in graph.inputs}
    expected = core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(inputs)["hidden"]
    compiled, plan = compile_npuw(graph, pipeline=pipeline)
    np.testing.assert_allclose(compiled(inputs)["hidden"], expected, rtol=1e-3, atol=1e-3)
    if pipeline == "NONE":
        assert plan is None
        return
    assert plan.calls < 2 * LAYERS
    assert plan.graphs < plan.calls
    assert max(int(run) for run in plan.described().split(" + ")) >= 5


def test_an_unknown_pipeline_is_refused(graph):
    with pytest.raises(InputError, match="expected one of REP, REG, NONE"):
        compile_npuw(graph, pipeline="FAST")
