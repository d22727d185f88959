"""Passes over a whole decoder's graph: what they change, that they change nothing else, and what they refuse."""

import nncf
import numpy as np
import openvino as ov
import pytest
import torch
from openvino.passes import GraphRewrite, Manager

from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import multiplies_exactly
from shadowattn.graphs.decoder.passes import LastTokenSlice, MakeStateful, ReplaceWeights, Rewrite, rewritten
from shadowattn.graphs.decoder.whole import LOGITS, cache_names, whole_graph
from shadowattn.models import load_bundled
from tests.engine.test_engine import MODELS
from tests.tiny import tiny_model

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}
COMPRESSIONS = {
    "float32": None,
    "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
    "int4": {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 32, "all_layers": True},
}


def compiled(graph: ov.Model) -> ov.CompiledModel:
    return core().compile_model(graph, "CPU", FLOAT32)


def compressed(graph: ov.Model, compression: str) -> ov.Model:
    options = COMPRESSIONS[compression]
    return graph if options is None else nncf.compress_weights(graph, **options)


def causal_mask(rows: int, before: int) -> torch.Tensor:
    return torch.triu(torch.full((1, 1, rows, before + rows), torch.finfo(torch.float32).min), before + 1)


def inputs(model, rows: int, before: int, seed: int = 0) -> list[np.ndarray]:
    """Random tokens, behind random keys and values of earlier ones."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    ids = torch.randint(0, config.vocab_size, (1, rows), generator=generator)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = (1, config.num_key_value_heads, before, head_dim)
    past = [torch.randn(size, generator=generator) for _ in range(2 * config.num_hidden_layers)]
    return [one.numpy() for one in (ids, causal_mask(rows, before), torch.arange(before, before + rows)[None], *past)]


def tied(model, together: bool):
    """The model, its output head the embedding or weights of its own."""
    model.config.tie_word_embeddings = together
    model.lm_head.weight = (
        model.model.embed_tokens.weight if together else torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.2)
    )
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_graph_computes_what_the_model_does(name):
    model = MODELS[name]()
    graph = whole_graph(model)
    ids = torch.randint(0, 128, (1, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
    run, past = compiled(graph), [np.zeros((1, model.config.num_key_value_heads, 0, model.config.head_dim), np.float32)] * 4
    first = run([ids[:, :4].numpy(), causal_mask(4, 0).numpy(), np.arange(4)[None], *past])
    present = [first[name] for name in cache_names(2).values()]
    rest = run([ids[:, 4:].numpy(), causal_mask(7, 4).numpy(), np.arange(4, 11)[None], *present])
    found = torch.from_numpy(np.concatenate([first[LOGITS], rest[LOGITS]], 1))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    weights = {node.get_friendly_name() for node in graph.get_ops() if node.get_type_name() == "Constant"}
    assert {name for name, _ in model.named_parameters() if name.endswith("proj.weight")} <= weights


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_last_tokens_logits_are_the_same_bits(together, compression, tmp_path):
    model = tied(tiny_model(), together)
    graph = compressed(whole_graph(model), compression)
    given = inputs(model, 5, 3)
    before = compiled(graph)(given)[LOGITS]
    first = LastTokenSlice()
    after = compiled(rewritten(graph, first))(given)[LOGITS]
    assert first.changed == 1
    assert after.shape == (1, 1, 128)
    if COMPRESSIONS[compression] and not multiplies_exactly():
        # Without VNNI the CPU plugin gives one row of products with compressed weights other last bits than several.
        np.testing.assert_allclose(after, before[:, -1:], atol=1e-5, rtol=1e-5)
    else:
        assert np.array_equal(after, before[:, -1:])
    again = LastTokenSlice()
    rewritten(graph, again)
    assert again.changed == 0
    ov.save_model(graph, tmp_path / "graph.xml", compress_to_fp16=False)
    read, once_more = core().read_model(tmp_path / "graph.xml"), LastTokenSlice()
    np.testing.assert_allclose(compiled(rewritten(read, once_more))(given)[LOGITS], after, atol=1e-4)
    assert once_more.changed == 0


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_last_tokens_logits_of_a_trained_model_are_the_same_bits(compression):
    graph = compressed(whole_graph(load_bundled().model), compression)
    given = inputs(load_bundled().model, 7, 20)
    before, slice_ = compiled(graph)(given)[LOGITS], LastTokenSlice()
    after = compiled(rewritten(graph, slice_))(given)[LOGITS]
    assert slice_.changed == 1
    exact = compression == "float32" or multiplies_exactly()
    np.testing.assert_allclose(after, before[:, -1:], atol=0 if exact else 1e-4, rtol=0)


def test_a_head_behind_a_soft_cap_and_a_bias_is_found_and_a_graph_without_one_is_refused():
    hidden = ov.opset13.parameter([-1, -1, 8], np.float32)
    weights = ov.opset13.constant(np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32))
    product = ov.opset13.matmul(hidden, weights, False, True)
    capped = ov.opset13.tanh(ov.opset13.add(product, ov.opset13.constant(np.ones(16, np.float32))))
    graph = ov.Model([capped], [hidden])
    found = LastTokenSlice()
    given = np.random.default_rng(1).normal(size=(2, 5, 8)).astype(np.float32)
    before = compiled(graph)([given])[0]
    assert np.array_equal(compiled(rewritten(graph, found))([given])[0], before[:, -1:])
    assert found.changed == 1
    bias = ov.opset13.parameter([-1, -1, 16], np.float32)  # of each token its own
    rows = ov.opset13.constant(np.ones((5, 1), np.float32))
    for other, given in ((bias, [hidden, bias]), (rows, [hidden])):
        biased = ov.opset13.add(ov.opset13.matmul(hidden, weights, False, True), other)
        with pytest.raises(InputError, match=r"LastTokenSlice: expected a product"):
            rewritten(ov.Model([biased], given), LastTokenSlice())
    pooled = ov.opset13.reduce_sum(ov.opset13.matmul(hidden, weights, False, True), np.int64([1]))
    with pytest.raises(InputError, match=r"LastTokenSlice: expected a product .* found none"):
        rewritten(ov.Model([pooled], [hidden]), LastTokenSlice())


def test_weights_are_replaced_by_name(tmp_path):
    model, other = tiny_model(), tiny_model()
    graph = whole_graph(model)
    constants = {node.get_friendly_name() for node in graph.get_ops() if node.get_type_name() == "Constant"}
    weights = {name: one.detach().numpy() for name, one in other.named_parameters() if name in constants}
    assert len(weights) > 10  # all matrices, and whatever vectors the converter leaves as they are
    random = np.random.default_rng(5)
    for array in weights.values():
        array += 0.01 * random.normal(size=array.shape).astype(np.float32)  # of the other model itself
    target, given, replace = whole_graph(other), inputs(model, 4, 2), ReplaceWeights(weights)
    rewritten(graph, replace)
    assert replace.changed == len(weights)
    ov.save_model(graph, tmp_path / "graph.xml", compress_to_fp16=False)
    expected = compiled(target)(given)[LOGITS]
    for found in (graph, core().read_model(tmp_path / "graph.xml")):
        np.testing.assert_allclose(compiled(found)(given)[LOGITS], expected, atol=1e-5)


def test_packed_weights_of_four_bits_are_replaced():
    graph = nncf.compress_weights(whole_graph(tiny_model()), **COMPRESSIONS["int4"])
    packed = [node for node in graph.get_ops() if node.get_type_name() == "Constant" and node.get_element_type().bitwidth == 4]
    old = packed[0]
    name, kind, shape = old.get_friendly_name(), old.get_element_type(), list(old.get_output_shape(0))
    bytes_ = np.random.default_rng(0).integers(0, 256, int(np.prod(shape)) // 2).astype(np.uint8)
    replace = ReplaceWeights({name: bytes_})
    rewritten(graph, replace)
    (new,) = [node for node in graph.get_ops() if node.get_friendly_name() == name]
    assert (replace.changed, new.get_element_type(), list(new.get_output_shape(0))) == (1, kind, shape)
    low, high = (bytes_ & 15).astype(np.int8), (bytes_ >> 4).astype(np.int8)
    values = np.stack([low, high], 1).flatten()
    values = np.where(values > 7, values - 16, values) if kind == ov.Type.i4 else values
    unpacked = ov.Model([ov.opset13.convert(new, "f32")], [])
    assert np.array_equal(compiled(unpacked)([])[0].flatten(), values)


def read_again(graph: ov.Model, path) -> ov.Model:
    ov.save_model(graph, path, compress_to_fp16=False)
    return core().read_model(path)


@pytest.mark.parametrize("make", [tiny_model, lambda: load_bundled().model], ids=["tiny", "bundled"])
def test_all_weights_of_four_bits_of_another_model_are_taken_over(make, tmp_path):
    """Packed values and their scales, in inference: the graph then computes what the other one does, also read from a file."""
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim == 2:  # of the others the converter keeps no names
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    graph, target = (compressed(whole_graph(model), "int4") for model in (make(), other))
    given, old = inputs(other, 4, 2), {node.get_friendly_name() for node in graph.get_ops()}
    constants = [node for node in target.get_ops() if node.get_type_name() == "Constant"]
    weights = {
        node.get_friendly_name(): np.array(node.data).view(np.uint8 if node.get_element_type().bitwidth == 4 else node.data.dtype)
        for node in constants
        if node.get_friendly_name().startswith(("model.", "lm_head."))
    }
    # Embedding, output head where it has weights of its own, and seven matrices a layer.
    outer = 1 if other.config.tie_word_embeddings else 2
    assert sum(name.endswith("/scale") for name in weights) == outer + 7 * other.config.num_hidden_layers
    assert set(weights) <= old
    expected, before = compiled(target)(given)[LOGITS], compiled(graph)(given)[LOGITS]
    replace = ReplaceWeights(weights)
    rewritten(graph, replace)
    assert replace.changed == len(weights)
    np.testing.assert_allclose(compiled(graph)(given)[LOGITS], expected, atol=1e-5)
    assert np.abs(before - expected).max() > 0.1
    # Both are read, since OpenVINO can add up in another order in a graph that it read.
    graph, target = (read_again(one, tmp_path / f"{name}.xml") for name, one in (("graph", graph), ("target", target)))
    np.testing.assert_allclose(compiled(graph)(given)[LOGITS], compiled(target)(given)[LOGITS], atol=1e-5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"nobody": np.zeros(3, np.float32)}, "nobody: the graph has no constant of that name"),
        ({"model.layers.0.mlp.up_proj.weight": np.zeros((3, 3), np.float32)}, r"expected f32 \[96, 64\], got float32 \[3, 3\]"),
        ({"model.layers.0.mlp.up_proj.weight": np.zeros((96, 64))}, r"expected f32 \[96, 64\], got float64"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(InputError, match=f"ReplaceWeights: .*{message}"):
        rewritten(whole_graph(tiny_model()), ReplaceWeights(weights))


@pytest.mark.parametrize("saved", [False, True])
def test_a_stateful_graph_goes_on_from_its_own_keys(saved, tmp_path):
    """The bundled model, token by token behind a prompt, as its own cache would; then anew after a reset."""
    model = load_bundled().model
    graph = whole_graph(model)
    pairs = cache_names(model.config.num_hidden_layers)
    make = MakeStateful(graph, pairs)
    rewritten(graph, make, LastTokenSlice())
    assert make.changed == len(pairs) == len(graph.get_sinks())
    assert [port.get_any_name() for port in graph.inputs] == ["input_ids", "mask", "position_ids"]
    if saved:
        ov.save_model(graph, tmp_path / "graph.xml", compress_to_fp16=False)
        graph = core().read_model(tmp_path / "graph.xml")
    prompt = torch.randint(0, 2560, (1, 9), generator=torch.Generator().manual_seed(2))
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0)
    request = compiled(graph).create_infer_request()
    for _ in range(2):
        request.reset_state()
        tokens, behind = prompt, prompt
        while tokens.shape[1] < expected.shape[1]:
            before = tokens.shape[1] - behind.shape[1]
            given = (behind, causal_mask(behind.shape[1], before), torch.arange(before, tokens.shape[1])[None])
            logits = request.infer([one.numpy() for one in given])[LOGITS]
            assert logits.shape[1] == 1
            behind = torch.from_numpy(logits[:, -1].argmax(-1, keepdims=True))
            tokens = torch.cat([tokens, behind], 1)
        assert tokens.equal(expected)


def test_pairs_that_do_not_fit_are_refused():
    for pairs, message in (
        ({"past.9.key": "present.9.key"}, "past.9.key: the graph has no input of that name"),
        ({"past.0.key": "nowhere"}, "nowhere: the graph has no output of that name"),
        ({"past.0.key": LOGITS}, r"past.0.key: expected f32 \[\?,2,\?,64\] at logits, got f32 \[\?,\?,128\]"),
    ):
        graph = whole_graph(tiny_model())
        with pytest.raises(InputError, match=f"MakeStateful: .*{message}"):
            rewritten(graph, MakeStateful(graph, pairs))


def test_they_run_in_a_graph_rewrite_and_as_one_model_pass():
    model = tiny_model()
    given = inputs(model, 4, 2)
    expected = compiled(whole_graph(model))(given)[LOGITS][:, -1:]
    weights = {"lm_head.weight": model.lm_head.weight.detach().numpy()}
    graph, manager = whole_graph(tied(model, False)), Manager()
    rewrite, matchers = GraphRewrite(), (LastTokenSlice(), ReplaceWeights(weights))
    for matcher in matchers:
        rewrite.add_matcher(matcher)
    rewrite.run_on_model(graph)
    assert [matcher.changed for matcher in matchers] == [1, 1]
    assert np.array_equal(compiled(graph)(given)[LOGITS], expected)
    graph = whole_graph(model)
    together = Rewrite([LastTokenSlice(), ReplaceWeights(weights)])
    manager.register_pass(together)
    manager.run_passes(graph)
    assert together.changed == 2
    assert np.array_equal(compiled(graph)(given)[LOGITS], expected)
    graph, rewrite, pairs = whole_graph(model), GraphRewrite(), cache_names(model.config.num_hidden_layers)
    matchers = (MakeStateful(graph, pairs), LastTokenSlice())
    for matcher in matchers:
        rewrite.add_matcher(matcher)
    rewrite.run_on_model(graph)
    assert [matcher.changed for matcher in matchers] == [len(pairs), 1]
    request = compiled(graph).create_infer_request()
    ids, rows = given[0], given[0].shape[1]
    stateful = request.infer([ids, causal_mask(rows, 0).numpy(), np.arange(rows)[None]])[LOGITS]
    with torch.no_grad():
        np.testing.assert_allclose(stateful, model(torch.from_numpy(ids)).logits[:, -1:], rtol=1e-4, atol=1e-4)
