"""NPUW's plans, on the CPU device."""

import gc

import numpy as np
import pytest
import torch

from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.graphs.decoder import npuw
from shadowattn.graphs.decoder.layers import OUT, StepSizes, one_graph, step_tensors
from shadowattn.graphs.decoder.npuw import Plan, compile_npuw, compile_npuw_llm
from shadowattn.graphs.decoder.whole import llm_graph
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
    assert (plan.calls, plan.graphs, len(plan.handed), plan.described()) == (4, 3, 4, "1 + 2 + 1")


@pytest.mark.parametrize(
    ("tags", "described"),
    [
        ("aaab", "3 + 1"),
        (".a.a.", "2·(1 + 1) + 1"),
        ("habababt", "1 + 3·(1 + 1) + 1"),
        ("habbabbt", "1 + 2·(1 + 2) + 1"),
        ("habbabt", "1 + 1 + 2 + 1 + 1 + 1"),
        ("", ""),
    ],
)
def test_groups_that_take_turns_are_told_together(tags, described):
    assert Plan(tuple(tags)).described() == described


def test_a_plan_without_groups_is_refused(tmp_path):
    (tmp_path / "plan.xml").write_text("<ensemble/>")
    with pytest.raises(InputError, match="expected NPUW's groups"):
        Plan.read(tmp_path / "plan.xml")


@pytest.mark.parametrize("pipeline", ["REP", "REG", "NONE"])
def test_npuw_computes_what_the_whole_graph_does(graph, pipeline):
    generator = np.random.default_rng(0)
    inputs = {port.any_name: generator.standard_normal(port.shape, np.float32) for port in graph.inputs}
    expected = core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(inputs)[OUT]
    compiled, plan = compile_npuw(graph, pipeline=pipeline)
    np.testing.assert_allclose(compiled(inputs)[OUT], expected, rtol=1e-3, atol=1e-3)
    if pipeline == "NONE":
        assert plan.described() == "1"
        return
    assert plan.calls < 2 * LAYERS
    assert plan.graphs < plan.calls
    assert max(int(run) for run in plan.described().split(" + ")) >= 5


@pytest.mark.parametrize("fold", [True, False])
def test_npuw_is_told_whether_to_fold(graph, monkeypatch, fold):
    told = []
    monkeypatch.setattr(npuw, "_compiled", lambda _, config: told.append(config))
    monkeypatch.setattr(Plan, "read", lambda _: None)
    compile_npuw(graph, pipeline="NONE", fold=fold)
    assert told[0]["NPUW_FOLD"] == {True: "YES", False: "NO"}[fold]


def test_an_unknown_pipeline_is_refused(graph):
    with pytest.raises(InputError, match="expected one of REP, REG, NONE"):
        compile_npuw(graph, pipeline="FAST")


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=LAYERS)


def after(request, ids, held):
    """The logits of the last of `held` tokens, which `ids` end with."""
    inputs = {
        "input_ids": ids,
        "attention_mask": np.ones((1, held), np.int64),
        "position_ids": np.arange(held - ids.shape[1], held)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    return request.infer(inputs)["logits"][:, -1].copy()


@pytest.mark.parametrize("pipeline", ["REP", "REG", "NONE"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_the_llm_mode_continues_a_prompt_as_the_model_does(model, chunk, pipeline):
    ids = torch.randint(0, 128, (1, 42), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0].numpy()
    compiled, plans = compile_npuw_llm(llm_graph(model, eager=True), prompt=48, response=16, pipeline=pipeline, chunk=chunk)
    request, tolerance = compiled.create_infer_request(), 2e-3 * float(np.abs(expected).max())
    np.testing.assert_allclose(after(request, ids[:, :41].numpy(), 41)[0], expected[40], atol=tolerance)
    np.testing.assert_allclose(after(request, ids[:, 41:].numpy(), 42)[0], expected[41], atol=tolerance)
    calls = {phase: plan.calls for phase, plan in plans.items()}
    if chunk:  # attention of every layer is a group of its own, whatever is asked for
        assert calls["prefill"] == 2 * LAYERS + 1
        assert f"{LAYERS - 1}·(1 + 1)" in plans["prefill"].described()
    else:
        assert (calls["prefill"] > 1) == (pipeline != "NONE")
    assert (calls["decode"] > 1) == (pipeline != "NONE")


def test_hints_of_the_llm_mode_cut_a_prompts_chunks_as_a_decoding_step_and_leave_that_step_whole(model):
    """With room for all keys in every chunk attention is no group of its own; it is the number of keys that sets it apart."""
    graph, ids = llm_graph(model, eager=True), torch.randint(0, 128, (1, 42), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0].numpy()
    sizes = {"prompt": 48, "response": 16, "pipeline": "REG", "chunk": 16}
    compiled, plans = compile_npuw_llm(graph, **sizes, attention="STATIC", decoding="BEST_PERF")
    request, tolerance = compiled.create_infer_request(), 2e-3 * float(np.abs(expected).max())
    np.testing.assert_allclose(after(request, ids[:, :41].numpy(), 41)[0], expected[40], atol=tolerance)
    np.testing.assert_allclose(after(request, ids[:, 41:].numpy(), 42)[0], expected[41], atol=tolerance)
    assert plans["decode"].described() == "1"
    _, plain = compile_npuw_llm(graph, **sizes)
    assert plans["prefill"].described() == plain["decode"].described() != plain["prefill"].described()


@pytest.mark.parametrize("chunk", [None, 16])
def test_what_the_llm_mode_compiled_is_read_from_a_cache_folder(model, chunk, tmp_path):
    """As another process would, with nothing of the first compilation left in memory."""
    ids = np.arange(30)[None]
    graph, made = llm_graph(model, eager=True), []
    for _ in range(2):
        compiled, plans = compile_npuw_llm(graph, prompt=48, response=16, pipeline="REG", chunk=chunk, cache=tmp_path)
        blobs = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.blob")}
        made.append((after(compiled.create_infer_request(), ids, 30), plans, blobs))
        del compiled
        gc.collect()
    (first, of_first, blobs), (again, of_again, same) = made
    assert len(blobs) == 1
    assert same == blobs  # another key would leave another file
    assert of_first == of_again
    np.testing.assert_array_equal(again, first)


def test_a_chunk_that_is_no_power_of_two_is_refused(model):
    with pytest.raises(InputError, match="chunk: expected a power of two"):
        compile_npuw_llm(llm_graph(model, eager=True), prompt=48, response=16, pipeline="REG", chunk=12)


@pytest.mark.parametrize(
    ("name", "message"), [("attention", "one of PYRAMID, STATIC"), ("decoding", "one of FAST_COMPILE, BEST")]
)
def test_an_unknown_hint_is_refused(model, name, message):
    with pytest.raises(InputError, match=f"{name}: expected {message}"):
        compile_npuw_llm(llm_graph(model, eager=True), prompt=48, response=16, pipeline="REG", **{name: "FAST"})


def test_what_has_nothing_to_act_on_is_refused(model, tmp_path):
    with pytest.raises(InputError, match="attention: expected PYRAMID where a prompt is one chunk"):
        compile_npuw_llm(llm_graph(model, eager=True), prompt=48, response=16, pipeline="REG", attention="STATIC")
    with pytest.raises(InputError, match="expected the plan that NPUW leaves, found none"):
        Plan.read(tmp_path / "plan.xml")
