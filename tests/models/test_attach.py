"""shadowAttn inside real transformers models of every attention shape."""

import copy
import io
import json
import logging
import pickle
import threading

import pytest
import torch
from torch.autograd import forward_ad
from transformers import AutoConfig, DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, StaticCache

import shadowattn
from shadowattn.engine.prefill import prefill_chunks
from shadowattn.errors import InputError
from shadowattn.kernels.torch_kernels import dense
from shadowattn.models import attended_layers, bypass_layer, fingerprint, load_bundled, model_shape, replace_attention
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.types import ScaleGrid
from tests.models.families import build
from tests.profiles import bank_for, profile_for
from tests.tensors import HEAD_DIMS, HEADS
from tests.tiny import tiny_model

# Larger than any value of a tiny model: nothing is clipped, and one pair leaves no choice of bucket.
ONE_PAIR = ScaleGrid((0.3,), (0.3,))


def tokens(length: int = 100, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 128, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids, **options):
    return model(input_ids=ids, **options).logits


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_retention_one_equals_dense(family, heads, kv_heads, head_dim):
    model, ids = tiny_model(heads=heads, kv_heads=kv_heads, head_dim=head_dim, family=family), tokens(batch=2)
    expected = logits(model, ids)
    with shadowattn.attach(model, profile_for(model, 1.0), bank_for(model), chunk_tokens=32) as sparse:
        torch.testing.assert_close(logits(model, ids), expected, atol=1e-4, rtol=0)
    assert sparse.counters.sparse_rows == 0
    # The same through estimate, selection and index lists: so near to 1 that every row keeps all it sees.
    with shadowattn.attach(model, profile_for(model, 0.9999), bank_for(model), chunk_tokens=32) as sparse:
        torch.testing.assert_close(logits(model, ids), expected, atol=1e-4, rtol=0)
    assert sparse.counters.sparse_rows == 2 * 2 * heads * 100  # batch, layers, heads, rows
    assert sparse.counters.density == 1.0


def test_the_bundled_model_at_retention_one_equals_dense():
    loaded = load_bundled()
    ids = loaded.tokenizer(
        "def quicksort(items):\n    if len(items) < 2:\n        return items\n" * 8, return_tensors="pt"
    ).input_ids
    expected = logits(loaded.model, ids)
    for retention in (1.0, 0.9999):
        with shadowattn.attach(loaded.model, profile_for(loaded.model, retention), bank_for(loaded.model, context_tokens=1024)):
            torch.testing.assert_close(logits(loaded.model, ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("query_block", [1, 32])
def test_a_future_token_changes_no_earlier_logit(query_block):
    model, ids = tiny_model(), tokens()
    with shadowattn.attach(
        model, profile_for(model, 0.2, grid=ONE_PAIR), bank_for(model, grid=ONE_PAIR), chunk_tokens=32, query_block=query_block
    ):
        before = logits(model, ids)
        for changed in (50, 99):
            other = ids.clone()
            other[0, changed] = (other[0, changed] + 1) % 128
            after = logits(model, other)
            torch.testing.assert_close(after[:, :changed], before[:, :changed], atol=1e-6, rtol=0)
            assert not torch.allclose(after[:, changed], before[:, changed])


def test_low_retention_changes_the_output():
    """The sparse path is really used: 10 % of the keys cannot give the same logits on a model far from uniform."""
    model, ids = tiny_model(), tokens()
    expected = logits(model, ids)
    with shadowattn.attach(model, profile_for(model, 0.1), bank_for(model), chunk_tokens=32) as sparse:
        assert (logits(model, ids) - expected).abs().max() > 0.1
    assert 0.1 <= sparse.counters.density < 0.12


@pytest.mark.parametrize("chunk_tokens", [32, 64, 33])
def test_chunked_prefill_equals_prefill_in_one_piece(chunk_tokens):
    model, ids = tiny_model(), tokens()
    with shadowattn.attach(model, profile_for(model, 0.2, grid=ONE_PAIR), bank_for(model, grid=ONE_PAIR), chunk_tokens=32):
        whole = logits(model, ids)
        parts = torch.cat([out for _, out in prefill_chunks(model, ids[0], chunk_tokens=chunk_tokens)])
    torch.testing.assert_close(parts, whole[0], atol=1e-4, rtol=0)


def test_a_lone_last_token_is_prefill_too():
    model, ids = tiny_model(), tokens(97)
    with shadowattn.attach(model, profile_for(model, 0.2), bank_for(model), chunk_tokens=32) as sparse:
        list(prefill_chunks(model, ids[0], chunk_tokens=32))
    assert sparse.counters.decode_rows == 0


def test_decode_is_dense_and_generate_works():
    model, ids = tiny_model(), tokens(40)
    with shadowattn.attach(model, profile_for(model, 0.2), bank_for(model), chunk_tokens=32) as sparse:
        out = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 45)
    assert sparse.counters.sparse_rows == 2 * 4 * 40
    assert sparse.counters.decode_rows == 2 * 4 * 4  # the first new token comes from the prefill


def test_heads_of_one_layer_may_mix_dense_and_sparse():
    model, ids = tiny_model(), tokens()
    profile = profile_for(model, 0.2)
    mixed = type(profile)(**vars(profile) | {"retention": ((1.0, 0.2, 1.0, 0.2), (1.0,) * 4)})
    seen = []
    with shadowattn.attach(model, mixed, None, estimator=Oracle(), chunk_tokens=32, observers=[seen.append]) as sparse:
        logits(model, ids)
    assert sparse.counters.sparse_rows == 200
    assert sparse.counters.dense_rows == 600
    assert {(s.chunk.layer, len(s.chunk.heads), s.selection is None) for s in seen} == {(0, 2, True), (0, 2, False), (1, 4, True)}
    assert 0.2 < sparse.counters.sparse_density < 0.22
    assert 0.79 < sparse.counters.density < 0.82


def test_the_model_is_itself_again_afterwards():
    model, ids = tiny_model(), tokens()
    before, mine = logits(model, ids), fingerprint(model)
    with (
        pytest.raises(RuntimeError, match="inside"),
        shadowattn.attach(model, profile_for(model, 0.2), bank_for(model)),
    ):
        raise RuntimeError("inside")
    assert logits(model, ids).equal(before)
    assert model.config._attn_implementation == "sdpa"
    assert fingerprint(model) == mine
    assert type(model.config._attn_implementation) is str
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_a_failed_attach_leaves_the_model_alone():
    model = tiny_model()
    with pytest.raises(InputError), shadowattn.attach(tiny_model(layers=3), profile_for(model, 0.2), bank_for(model)):
        pass
    with shadowattn.attach(model, profile_for(model, 0.2), bank_for(model)):
        pass


def test_refuses_a_profile_of_another_model():
    model, other = tiny_model(), tiny_model(heads=8)
    with (
        pytest.raises(InputError, match="run the offline stage"),
        shadowattn.attach(model, profile_for(other, 0.2), None),
    ):
        pass


def test_refuses_a_bank_of_another_head_dimension():
    model = tiny_model()
    with (
        pytest.raises(InputError, match=r"the model's is 64, the bank was built for \[80\]"),
        shadowattn.attach(model, profile_for(model, 0.2), bank_for(tiny_model(head_dim=80))),
    ):
        pass


def test_refuses_to_nest():
    model = tiny_model()
    bank, profile = bank_for(model), profile_for(model, 0.2)
    with (
        shadowattn.attach(model, profile, bank),
        pytest.raises(InputError, match="replaced already"),
        shadowattn.attach(model, profile, bank),
    ):
        pass


@torch.no_grad()
def test_a_number_is_every_heads_retention_with_scales_of_the_tensors():
    model, ids = tiny_model(), tokens()
    with shadowattn.attach(model, 0.2, chunk_tokens=32) as sparse:
        found = logits(model, ids)
    assert 0.2 < sparse.counters.density < 0.22
    how = {"estimator": Int8Tensor(), "chunk_tokens": 32}
    with shadowattn.attach(model, profile_for(model, 0.2), **how):
        torch.testing.assert_close(found, logits(model, ids), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, logits(model, ids), atol=1e-3)


@pytest.mark.parametrize("retention", [0.0, 1.5, -0.2, float("nan"), True, "0.2", None, [0.2] * 4, 2])
def test_refuses_what_is_no_retention(retention):
    with pytest.raises(InputError, match="retention: expected"), shadowattn.attach(tiny_model(), retention):
        pass


def test_refuses_a_chunk_that_splits_blocks():
    model = tiny_model()
    with (
        pytest.raises(InputError, match="multiple of query_block"),
        shadowattn.attach(model, profile_for(model, 0.2), bank_for(model), chunk_tokens=48, query_block=32),
    ):
        pass


def test_refuses_a_prompt_longer_than_the_context():
    model = tiny_model()
    with (
        shadowattn.attach(model, profile_for(model, 0.2), bank_for(model)),
        pytest.raises(InputError, match="context is 512 tokens, got 600"),
    ):
        logits(model, tokens(600))


def test_refuses_padding_but_takes_a_mask_of_ones():
    model, ids = tiny_model(), tokens(20, batch=2)
    mask = torch.ones_like(ids)
    with shadowattn.attach(model, profile_for(model, 0.5), bank_for(model)):
        assert logits(model, ids, attention_mask=mask).equal(logits(model, ids))
        mask[0, :3] = 0
        with pytest.raises(InputError, match="padding"):
            logits(model, ids, attention_mask=mask)


def test_refuses_a_static_cache():
    model, ids = tiny_model(), tokens(20)
    cache = StaticCache(config=model.config, max_cache_len=64)
    with (
        shadowattn.attach(model, profile_for(model, 0.5), bank_for(model)),
        pytest.raises(InputError, match="DynamicCache"),
    ):
        logits(model, ids, past_key_values=cache)


def test_replace_attention_with_dense_changes_nothing():
    model, ids = tiny_model(), tokens()
    expected = logits(model, ids)

    def attention(layer, q, k, v, scale, request):
        return dense(q, k, v, causal_offset=k.shape[2] - q.shape[2], scale=scale)

    with replace_attention(model, attention):
        torch.testing.assert_close(logits(model, ids), expected)
        cache = DynamicCache(config=model.config)
        logits(model, ids[:, :60], past_key_values=cache)
        torch.testing.assert_close(logits(model, ids[:, 60:], past_key_values=cache), expected[:, 60:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_bypassed_layer_passes_its_input_on(family):
    model, ids = tiny_model(layers=3, family=family), tokens()
    seen = {}

    def remember(name):
        return lambda module, args, output: seen.__setitem__(name, args[0])

    layers = model.get_decoder().layers
    handles = [layers[1].register_forward_hook(remember(1)), layers[2].register_forward_hook(remember(2))]
    with bypass_layer(model, 1):
        logits(model, ids)
    assert seen[1].equal(seen[2])
    for handle in handles:
        handle.remove()
    with_layer = logits(model, ids)
    with bypass_layer(model, 1):
        assert not logits(model, ids).equal(with_layer)
    assert logits(model, ids).equal(with_layer)


def test_model_shape():
    shape = model_shape(tiny_model(heads=4, kv_heads=1, head_dim=80, layers=3))
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.context_tokens) == (3, 4, 1, 80, 512)


def test_fingerprint_tells_checkpoints_apart_but_not_dtypes():
    model = tiny_model().bfloat16()
    mine = fingerprint(model)
    assert fingerprint(model.float()) == mine
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    assert fingerprint(model) != mine


def sparse_attach(model, retention: float = 0.2, **options):
    return shadowattn.attach(model, profile_for(model, retention), None, estimator=Oracle(), chunk_tokens=32, **options)


@pytest.mark.parametrize("ready", ["bool", "float", "dict"])
def test_refuses_ready_made_masks(ready):
    model, ids = tiny_model(), tokens(20)
    seen = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    seen[..., :3] = False
    seen[..., range(20), range(20)] = True
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    mask = {"bool": seen, "float": added, "dict": {"full_attention": added}}[ready]
    with sparse_attach(model) as sparse, pytest.raises(InputError, match="no ready-made mask"):
        logits(model, ids, attention_mask=mask)
    assert sparse.counters.sparse_rows == 0


def test_refuses_a_model_that_makes_a_bias_of_its_mask():
    model = build("doge")
    with sparse_attach(model), pytest.raises(InputError, match="computes with its attention mask"):
        logits(model, tokens(20) % 64)


def test_refuses_arguments_of_attention_that_it_does_not_know():
    model = tiny_model()
    with sparse_attach(model):
        for name in ("softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q", "whatever"):
            with pytest.raises(InputError, match=f"layer 0 uses {name}"):
                logits(model, tokens(20), **{name: torch.ones(4)})
        with pytest.raises(InputError, match="causal"):
            logits(model, tokens(20), is_causal=False)
        with pytest.raises(InputError, match="uses output_attentions"):
            logits(model, tokens(20), output_attentions=True)


def test_refuses_packed_sequences():
    model, positions = tiny_model(), torch.cat([torch.arange(8), torch.arange(12)])[None]
    with sparse_attach(model), pytest.raises(InputError, match="got packed sequences"):
        logits(model, tokens(20), position_ids=positions, use_cache=False)


def test_refuses_gradient_checkpointing():
    """Whose first forward pass has no gradients, and whose second may come after the context."""
    model, ids = tiny_model().train(), tokens(20)
    model.activation_checkpointing_enable({"use_reentrant": True})
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    with shadowattn.attach(model, 0.3), pytest.raises(InputError, match=r"gradient checkpointing is on.*model\.eval"):
        model(inputs_embeds=embeddings, use_cache=False)
    model.eval()
    with shadowattn.attach(model, 0.3) as run:
        logits(model, ids)
    assert run.counters.sparse_rows


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, of its first dual tensor
def test_refuses_forward_mode_derivatives():
    model, ids = tiny_model(), tokens(20)
    embeddings = model.get_input_embeddings()(ids).detach()
    with forward_ad.dual_level(), torch.no_grad(), shadowattn.attach(model, 0.3):
        dual = forward_ad.make_dual(embeddings, torch.ones_like(embeddings))
        with pytest.raises(InputError, match="expected a tensor without a tangent"):
            model(inputs_embeds=dual, use_cache=False)


class Waits:
    """Runs a model in another thread, which stops behind its first layer until `go`."""

    def __init__(self, model):
        self.reached, self.go, self.found = threading.Event(), threading.Event(), []
        hook = model.get_decoder().layers[0].register_forward_hook(self._wait)
        self.thread = threading.Thread(target=self._run, args=(model, hook))
        self.thread.start()
        assert self.reached.wait(60)

    def _wait(self, module, args, output):
        self.reached.set()
        self.go.wait(60)

    def _run(self, model, hook):
        try:
            self.found.append(logits(model, tokens(20)))
        except InputError as error:
            self.found.append(error)
        finally:
            hook.remove()

    def result(self):
        self.go.set()
        self.thread.join()
        return self.found[0]


def test_a_forward_pass_that_began_before_is_refused():
    model = tiny_model()
    running = Waits(model)
    with shadowattn.attach(model, 0.3):
        error = running.result()
    assert isinstance(error, InputError)
    assert "attach before any thread calls it" in str(error)


def test_leaving_during_another_threads_forward_pass_is_an_error():
    model = tiny_model()
    expected = logits(model, tokens(20))
    context = shadowattn.attach(model, 0.3)
    context.__enter__()
    running = Waits(model)
    with pytest.raises(InputError, match="1 forward pass"):
        context.__exit__(None, None, None)
    running.result()
    torch.testing.assert_close(logits(model, tokens(20)), expected, rtol=0, atol=0)  # dense again


def test_an_interrupted_forward_pass_of_its_own_is_over():
    model = tiny_model()

    def interrupt(module, args, output):
        raise KeyboardInterrupt

    handle = model.get_decoder().layers[0].register_forward_hook(interrupt)
    with shadowattn.attach(model, 0.3):
        with pytest.raises(KeyboardInterrupt):
            logits(model, tokens(20))
        handle.remove()
    assert logits(model, tokens(20)).isfinite().all()


def test_refuses_gradients():
    model, ids = tiny_model(), tokens(20)
    with sparse_attach(model) as sparse:
        with pytest.raises(InputError, match=r"a gradient is required.*torch\.no_grad"):
            model(input_ids=ids, labels=ids)
        assert sparse.counters.sparse_rows == 0
        model.requires_grad_(False)
        assert model(input_ids=ids).logits.equal(logits(model, ids))


def test_refuses_dropout():
    config = tiny_model().config
    config.attention_dropout = 0.1
    model, ids = type(tiny_model())(config).train(), tokens(20)
    with sparse_attach(model):
        with pytest.raises(InputError, match=r"dropout of 0\.1.*model\.eval"):
            logits(model, ids)
        logits(model.eval(), ids)


@pytest.mark.parametrize("family", ["falcon", "gptj", "codegen", "xglm", "bloom", "mpt"])
def test_refuses_models_that_do_not_ask_the_registry(family):
    model = build(family)
    with pytest.raises(InputError, match="attention registry"), replace_attention(model, lambda *_: None):
        pass
    with pytest.raises(InputError, match="attention registry"):
        model_shape(model)


def test_a_forward_pass_that_leaves_a_layer_out_is_an_error():
    model, ids = tiny_model(layers=3), tokens(20)
    own = model.model.layers[1].forward
    with sparse_attach(model):
        model.model.layers[1].forward = lambda hidden, **_: hidden
        with pytest.raises(InputError, match=r"layers \[1\] did not ask"):
            logits(model, ids)
        model.model.layers[1].forward = own
        logits(model, ids)


def test_hybrids_count_the_layers_that_attend():
    model = build("nemotron_h")
    assert attended_layers(model) == [2]
    assert model_shape(model).layers == 1
    ids = tokens(20) % 64
    with sparse_attach(model, 0.3) as sparse:
        logits(model, ids)
    assert sparse.counters.sparse_rows == 4 * 20


def gemma3(kinds, *, window: int = 8):
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        sliding_window=window,
        layer_types=kinds,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Gemma3ForCausalLM(config).eval()


SLIDING, FULL = "sliding_attention", "full_attention"


def test_windowed_layers_are_dense_within_their_window(caplog, monkeypatch):
    # Hydra, where an earlier test has used it, disables the loggers that it finds.
    monkeypatch.setattr(logging.getLogger("shadowattn.models.registry"), "disabled", False)
    model, ids = gemma3([SLIDING, FULL, SLIDING]), tokens(100, batch=2)
    expected = logits(model, ids)
    with caplog.at_level(logging.INFO), sparse_attach(model, 1.0) as dense:
        torch.testing.assert_close(logits(model, ids), expected, atol=1e-4, rtol=0)
    assert (dense.counters.windowed_rows, dense.counters.dense_rows) == (2 * 2 * 4 * 100, 2 * 4 * 100)
    assert [r.getMessage() for r in caplog.records if r.name == "shadowattn.models.registry"] == [
        f"layer {layer} has a sliding window of 8 tokens and stays dense within it" for layer in (0, 2)
    ]
    with sparse_attach(model, 0.2) as sparse:
        assert (logits(model, ids) - expected).abs().max() > 0.01
    assert (sparse.counters.windowed_rows, sparse.counters.sparse_rows) == (2 * 2 * 4 * 100, 2 * 4 * 100)


@pytest.mark.parametrize("pieces", [(60, 40), (5, 3, 92), (99, 1), (7, 1, 1, 91)])
def test_windowed_layers_continue_from_a_cache(pieces):
    model, ids = gemma3([SLIDING, FULL]), tokens(100)
    expected = logits(model, ids)
    with sparse_attach(model, 1.0):
        cache, out = DynamicCache(config=model.config), []
        for piece in ids.split(pieces, dim=1):
            out.append(logits(model, piece, past_key_values=cache))
    torch.testing.assert_close(torch.cat(out, 1), expected, atol=1e-4, rtol=0)


def test_a_model_with_only_full_layers_and_a_window_in_its_config_works():
    model, ids = gemma3([FULL, FULL]), tokens()
    expected = logits(model, ids)
    with sparse_attach(model, 0.9999) as sparse:
        torch.testing.assert_close(logits(model, ids), expected, atol=1e-4, rtol=0)
    assert (sparse.counters.sparse_rows, sparse.counters.windowed_rows) == (2 * 4 * 100, 0)


def test_a_model_of_windows_alone_is_refused():
    model = gemma3([SLIDING, SLIDING])
    with sparse_attach(model), pytest.raises(InputError, match=r"every layer has a sliding window \(\[8\] tokens\)"):
        logits(model, tokens())


def test_stages_that_know_no_windows_refuse_them():
    model = gemma3([SLIDING, FULL])
    with replace_attention(model, lambda *_: None), pytest.raises(InputError, match="layer 0 has a sliding window of 8 tokens"):
        logits(model, tokens())


def deep(model):
    return copy.deepcopy(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("duplicate", [deep, pickled, saved_whole])
def test_a_copy_made_inside_is_dense_and_can_be_attached(duplicate):
    model, ids = tiny_model(), tokens()
    expected = logits(model, ids)
    with sparse_attach(model) as sparse:
        few = logits(model, ids)
        other = duplicate(model)
        counted = sparse.counters.sparse_rows
        assert other.config._attn_implementation == "sdpa"
        assert logits(other, ids).equal(expected)
        assert sparse.counters.sparse_rows == counted
        with sparse_attach(other):
            assert logits(other, ids).equal(few)
        assert logits(model, ids).equal(few)
    assert logits(other, ids).equal(expected)
    with sparse_attach(other) as again:
        assert logits(other, ids).equal(few)
    assert again.counters.sparse_rows == counted


def test_a_model_saved_inside_is_dense(tmp_path):
    model, ids = tiny_model(), tokens()
    expected = logits(model, ids)
    with sparse_attach(model):
        model.save_pretrained(tmp_path)
    assert "shadowattn" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation != "shadowattn"
    assert logits(type(model).from_pretrained(tmp_path), ids).equal(expected)


def test_two_models_of_one_config_object():
    model = tiny_model()
    other = type(model)(model.config).eval()
    with sparse_attach(model):
        with pytest.raises(InputError, match=r"shares its config.*copy\.deepcopy\(model\.config\)"):
            logits(other, tokens())
        shallow = type(model)(copy.copy(model.config)).eval()
        with pytest.raises(InputError, match="same config object is attached"), sparse_attach(other):
            pass
    logits(other, tokens())
    with sparse_attach(other):
        logits(other, tokens())
    with sparse_attach(shallow):  # its config kept the registered name, and is nobody else's
        logits(shallow, tokens())
    logits(shallow, tokens())


def test_refuses_weights_without_values():
    model = tiny_model()
    profile = profile_for(model, 0.2)
    with pytest.raises(InputError, match="meta device"), shadowattn.attach(model.to("meta"), profile, None, estimator=Oracle()):
        pass


@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch of Python 3.13.0
def test_a_compiled_model_is_attached_by_its_own():
    """Compiled before, called inside and after: dense, sparse, dense."""
    model, ids = tiny_model(), tokens()
    compiled = torch.compile(model, backend="eager")
    expected = logits(model, ids)
    torch.testing.assert_close(logits(compiled, ids), expected)
    with sparse_attach(model) as sparse:
        few = logits(model, ids)
        torch.testing.assert_close(logits(compiled, ids, use_cache=False), few)
        assert sparse.counters.sparse_rows == 2 * 2 * 4 * 100
    torch.testing.assert_close(logits(compiled, ids), expected)
    with pytest.raises(InputError, match="not compiled or wrapped, got OptimizedModule"):
        model_shape(compiled)


def test_beam_search_and_prefix_reuse():
    model, ids = tiny_model(), tokens(60)
    beams = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with sparse_attach(model, 1.0):
        found = model.generate(ids, **beams)
        cache = DynamicCache(config=model.config)
        logits(model, ids[:, :40], past_key_values=cache)
        torch.testing.assert_close(
            logits(model, ids[:, 40:], past_key_values=copy.deepcopy(cache)), logits(model, ids)[:, 40:], atol=1e-4, rtol=0
        )
    assert found.equal(model.generate(ids, **beams))


def test_a_bypassed_layer_of_any_name():
    """GPT-2 calls its layers `h`."""
    model, ids = build("gpt2"), tokens(20) % 64
    with bypass_layer(model, 0), bypass_layer(model, 1):
        found = logits(model, ids)
    inner = model.transformer
    hidden = inner.wte(ids) + inner.wpe(torch.arange(20))
    torch.testing.assert_close(found, model.lm_head(inner.ln_f(hidden)).detach())


@pytest.mark.parametrize(
    "make", [lambda grid: Int8Graph(bank_for(tiny_model(), grid=grid)), Int8Fused], ids=["int8", "int8_fused"]
)
def test_refuses_an_estimator_of_other_scales(make):
    model, grid = tiny_model(), ScaleGrid((1e-6, 2e-6, 4e-6), (1e-6, 2e-6, 4e-6))
    with (
        pytest.raises(InputError, match=r"other scales|not that of the profile|built for the scales"),
        shadowattn.attach(model, profile_for(model, 0.2), None, estimator=make(grid), chunk_tokens=32),
    ):
        pass


@pytest.mark.parametrize("mask", [torch.ones(1, 10), torch.ones(1, 1, 50)], ids=["shorter than the prompt", "3-D"])
def test_refuses_a_mask_of_another_shape_than_the_prompt(mask):
    model = tiny_model()
    with (
        shadowattn.attach(model, profile_for(model, 1.0), None, estimator=Oracle()),
        torch.no_grad(),
        pytest.raises(InputError, match="expected one value for each of the 50 tokens"),
    ):
        model(input_ids=tokens(50), attention_mask=mask)


def test_several_threads_may_run_an_attached_model():
    model = tiny_model()
    with shadowattn.attach(model, profile_for(model, 0.3), None, estimator=Oracle()), torch.no_grad():
        alone, found, barrier = model(tokens(64)).logits, [], threading.Barrier(3)

        def run():
            with torch.no_grad():
                barrier.wait()
                found.extend(model(tokens(64)).logits for _ in range(4))

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 12  # none of them was refused
    for logits in found:
        torch.testing.assert_close(logits, alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"retention": "0.2"}, "retention: expected a number, got"),
        ({"bank": "bank"}, "bank: expected a GraphBank, got"),
        ({"chunk_token": 32}, "attach: expected options out of .*chunk_tokens.*, got chunk_token"),
    ],
)
def test_refuses_arguments_of_another_kind(change, message):
    model = tiny_model()
    given = {"retention": profile_for(model, 0.2), "bank": None, "estimator": Oracle()} | change
    with pytest.raises(InputError, match=message), shadowattn.attach(model, **given):
        pass
