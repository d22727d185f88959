"""The engine against transformers: the same logits, the same tokens, whatever the chunks, the cache and the drafts."""

import copy
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from shadowattn import Engine, Method, attach
from shadowattn.engine import reference
from shadowattn.engine.drafts import PromptLookup
from shadowattn.engine.engine import block_heights
from shadowattn.engine.equalisation import equalised
from shadowattn.engine.prefill import prefill_chunks
from shadowattn.engine.sampling import Sampling
from shadowattn.errors import InputError
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import multiplies_exactly
from shadowattn.graphs.decoder import runner
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.graphs.decoder.runner import products
from shadowattn.kernels.torch_kernels import dense
from shadowattn.method import CHUNK_TOKENS
from shadowattn.models.decoder import read_decoder
from shadowattn.offline import observe_block_ranges
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.types import ScaleGrid
from tests.profiles import bank_for, profile_for
from tests.tiny import tiny_model

CONSTANTS = BlockForm(weights="constants")


def qwen3():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=512, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def biased(model):
    """Biases that are not zero, as a trained Qwen has them."""
    torch.manual_seed(1)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            torch.nn.init.normal_(getattr(layer.self_attn, name).bias, std=0.5)
    return model


MODELS = {"qwen2": lambda: biased(tiny_model()), "llama": lambda: tiny_model(family="llama", kv_heads=1), "qwen3": qwen3}


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(model, tokens: list[int], count: int) -> list[int]:
    """What transformers generates."""
    ids = torch.tensor([tokens])
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(tokens) :].tolist()


def logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    return torch.cat([part for _, part in engine.prefill_chunks(torch.tensor(tokens))])


@pytest.mark.parametrize("form", [BlockForm(), CONSTANTS], ids=["inputs", "constants"])
@pytest.mark.parametrize("family", MODELS)
def test_the_logits_and_the_tokens_are_transformers(family, form):
    model, tokens = MODELS[family](), prompt(37)
    engine = Engine(model, form=form, chunk_tokens=16)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits(engine, tokens), expected, rtol=1e-4, atol=1e-4)
    run = engine.generate(tokens, new_tokens=24)
    assert list(run) == greedy(model, tokens, 24)
    assert (run.spent.prompt_tokens, run.spent.reused_tokens, run.spent.new_tokens) == (37, 0, 24)
    assert set(run.spent.prefill) == set(run.spent.decode) == {"blocks", "rotary embedding", "attention", "head"}


@given(length=st.integers(1, 80), chunk=st.sampled_from([1, 7, 16, 64]), seed=st.integers(0, 3))
@settings(max_examples=20)
def test_chunks_and_padding_change_nothing(length, chunk, seed):
    model, tokens = tiny_model(), prompt(length, seed)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits(Engine(model, chunk_tokens=chunk), tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "chunk", "expected"),
    [(BlockForm(), 256, [1, 8, 64, 128, 256]), (BlockForm(), 300, [1, 8, 75, 150, 300]), (CONSTANTS, 256, [1, 8, 256])],
)
def test_the_rest_of_a_prompt_takes_the_lowest_blocks_that_hold_it(form, chunk, expected):
    """Constants would take a graph a layer and height."""
    assert block_heights(chunk, form) == expected
    model, tokens = tiny_model(), prompt(chunk + 70)
    engine = Engine(model, form=form, chunk_tokens=chunk)
    found = logits(engine, tokens)
    assert set(engine._blocks) == {next(height for height in expected if height >= 70), chunk}
    with torch.no_grad():
        torch.testing.assert_close(found, model(torch.tensor([tokens])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("look_ahead", [None, 1])
def test_lower_blocks_compute_what_a_chunks_do(look_ahead):
    """Also the second prompt through the same ones, whose padding holds rows of the first."""
    model, method = tiny_model(), Method(0.3, estimator="int8_fused")
    options = {"method": method, "chunk_tokens": 128, "look_ahead": look_ahead}
    lower, whole = Engine(model, **options), Engine(model, form=CONSTANTS, **options)
    lower.compile(128 + 60)
    assert sorted(lower._blocks) == [1, 64, 128]
    for length, seed in ((128 + 60, 0), (128 + 50, 1)):
        tokens = prompt(length, seed)
        torch.testing.assert_close(logits(lower, tokens), logits(whole, tokens), rtol=1e-4, atol=1e-4)
    assert sorted(lower._blocks) == [1, 64, 128]
    assert sorted(whole._blocks) == [128]


@pytest.mark.parametrize("drafts", [0, 3, 20])
def test_what_was_compiled_before_is_all_that_an_answer_takes(drafts):
    engine = Engine(tiny_model(), chunk_tokens=128)
    engine.compile(200, drafts=drafts)
    compiled = set(engine._blocks)
    assert compiled == {0: {1, 128}, 3: {1, 8, 128}, 20: {1, 8, 64, 128}}[drafts] | {128}
    lookup = PromptLookup(1, drafts) if drafts else None
    list(engine.generate([*range(5, 15)] * 20, new_tokens=12, drafts=lookup))
    assert set(engine._blocks) == compiled


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparse_attention_between_the_blocks_is_that_of_attach(dtype):
    """The same keys are kept as inside the model: with float32 the logits agree to rounding."""
    model, tokens = tiny_model(), prompt(70)
    engine = Engine(model, method=Method(0.3, estimator="oracle"), chunk_tokens=32, attention_dtype=dtype)
    found = logits(engine, tokens)
    with attach(model, 0.3, estimator="oracle") as run:
        expected = torch.cat([part for _, part in prefill_chunks(model, torch.tensor(tokens), chunk_tokens=32)])
    assert (found - expected).norm() / expected.norm() < {"float32": 1e-5, "bfloat16": 0.03}[dtype]
    assert engine.attention.counters == run.counters
    dense = logits(Engine(model, chunk_tokens=32), tokens)
    assert (dense - expected).abs().max() > 0.5


@pytest.mark.parametrize(
    ("method", "chunk"),
    [
        (Method(0.3), 48),
        (Method(0.3, query_block=16), 48),
        (Method(0.3, query_block=32), 128),
        (Method(0.3, chunk_tokens=16), 16),
        (Method(1.0), 48),
    ],
)
def test_attention_takes_the_engines_chunks_where_they_fit(method, chunk):
    engine = Engine(tiny_model(), method=method, chunk_tokens=48)
    assert engine.attention.chunk_tokens == chunk
    assert logits(engine, prompt(100)).isfinite().all()


def test_graphs_keep_their_own_height():
    model = tiny_model()
    bank = bank_for(model, chunk_tokens=16)
    engine = Engine(model, method=Method(profile_for(model, 0.3), bank), chunk_tokens=48)
    assert engine.attention.chunk_tokens == 16
    assert logits(engine, prompt(100)).isfinite().all()
    engine = Engine(model, method=Method(profile_for(model, 0.3), estimator=Int8Graph(bank)), chunk_tokens=48)
    assert engine.attention.chunk_tokens == CHUNK_TOKENS  # the method's own


def test_a_prompt_goes_on_from_a_cache_as_far_as_it_begins_alike():
    model, first = tiny_model(), prompt(50)
    engine = Engine(model, method=Method(0.4, estimator="quest"), chunk_tokens=16)
    cache = engine.cache()
    made = list(engine.generate(first, new_tokens=8, cache=cache))
    assert cache.tokens == first + made[:-1]
    second = first + made + prompt(20, seed=5)
    run = engine.generate(second, new_tokens=8, cache=cache)
    assert list(run) == list(engine.generate(second, new_tokens=8, cache=engine.cache()))
    assert run.spent.reused_tokens == len(first) + len(made) - 1
    third = first[:20] + prompt(20, seed=6)
    run = engine.generate(third, new_tokens=8, cache=cache)
    assert list(run) == list(engine.generate(third, new_tokens=8, cache=engine.cache()))
    assert run.spent.reused_tokens == 20
    again = engine.generate(third, new_tokens=1, cache=cache)
    assert list(again) == list(engine.generate(third, new_tokens=1, cache=engine.cache()))
    assert again.spent.reused_tokens == len(third) - 1  # one goes through, for its logits


def test_a_cache_that_holds_tokens_grows_up_to_the_models_context(monkeypatch):
    """What it holds, and what an estimator derived of it, goes along."""
    engine = Engine(tiny_model(), method=Method(0.4, estimator="quest"), chunk_tokens=64)
    most, cache, capacities = engine.decoder.shape.context_tokens, engine.cache(), []
    text = prompt(most)
    for end in (200, 300, most - 3):
        run = engine.generate(text[:end], new_tokens=4, cache=cache)
        assert list(run) == list(engine.generate(text[:end], new_tokens=4))
        capacities.append(cache.capacity)
    assert capacities == [256, most, most]
    assert cache.bytes == 2 * 2 * most * 2 * 64 * 4  # keys and values, layers, tokens, heads, their size, float32
    monkeypatch.setattr(engine, "forward", None)
    with pytest.raises(InputError, match=f"context is {most} tokens, got a prompt of {most - 2} and 4 new ones"):
        engine.generate(text[: most - 2], new_tokens=4, cache=cache)
    monkeypatch.undo()
    assert len(list(engine.generate(text, new_tokens=1))) == 1  # of which nobody reads the keys


def test_a_cache_serves_the_engine_that_made_it_alone():
    """Another model's keys, and values that another form has scaled, would be read as its own."""
    model, tokens = tiny_model(), prompt(40)
    first, other = (Engine(model, form=BlockForm("w8a8", smooth=s), ranges=ranges(model), chunk_tokens=16) for s in (0.0, 0.8))
    cache = first.cache()
    list(first.generate(tokens, new_tokens=4, cache=cache))
    refused = pytest.raises(InputError, match=r"cache: expected one of this engine's own.*engine\.cache\(\)")
    with refused:
        other.generate(tokens, new_tokens=4, cache=cache)
    with refused:
        other.forward(cache, tokens[:4])
    assert len(cache) == 43
    with pytest.raises(InputError, match="cache: expected a KVCache"):
        first.generate(tokens, cache={})


def test_two_generations_do_not_take_turns_on_a_cache():
    engine, tokens = Engine(tiny_model(), chunk_tokens=16), prompt(40)
    cache = engine.cache()
    first = iter(engine.generate(tokens, new_tokens=8, cache=cache))
    next(first)
    list(engine.generate(tokens + prompt(5, seed=1), new_tokens=3, cache=cache))
    with pytest.raises(InputError, match="cache: expected it as this generation left it"):
        next(first)
    ended = iter(engine.generate(tokens, new_tokens=1, cache=cache))
    next(ended)
    list(engine.generate(tokens + prompt(5, seed=2), new_tokens=3, cache=cache))
    assert list(ended) == []  # of which nothing was left to come


def test_a_copy_of_a_cache_goes_on_by_itself():
    engine, tokens = Engine(tiny_model(), method=Method(0.4, estimator="quest"), chunk_tokens=16), prompt(40)
    cache = engine.cache()
    list(engine.generate(tokens, new_tokens=1, cache=cache))
    copied = copy.deepcopy(cache)
    for ours, end in ((cache, prompt(9, seed=1)), (copied, prompt(9, seed=2))):
        run = engine.generate(tokens + end, new_tokens=6, cache=ours)
        assert list(run) == list(engine.generate(tokens + end, new_tokens=6))
        assert run.spent.reused_tokens == 40


@pytest.mark.parametrize(
    "estimator",
    [Int8Fused(grid=ScaleGrid((0.1,), (0.1,), "product")), "quest", "oracle"],
    ids=["int8_fused", "quest", "oracle"],
)
@pytest.mark.parametrize("reused", [23, 37, 50])
def test_a_reused_prefix_ranks_as_a_whole_prompt_does(estimator, reused):
    """Wherever it ends, for estimators whose scales do not go by the chunk."""
    engine = Engine(tiny_model(), method=Method(0.3, estimator=estimator), chunk_tokens=16)
    cache, whole = engine.cache(), prompt(90)
    list(engine.generate(whole[:reused] + prompt(20, seed=1), new_tokens=1, cache=cache))
    run, fresh = engine.generate(whole, new_tokens=8, cache=cache), engine.cache()
    assert list(run) == list(engine.generate(whole, new_tokens=8, cache=fresh))
    assert run.spent.reused_tokens == reused
    for ours, expected in zip(cache._held, fresh._held, strict=True):
        torch.testing.assert_close(ours[:, : len(whole)], expected[:, : len(whole)], rtol=1e-4, atol=1e-4)


def test_seconds_are_the_engines_alone():
    """Not those of whoever takes the tokens."""
    run = Engine(tiny_model(), chunk_tokens=16).generate(prompt(20), new_tokens=4)
    for _ in run:
        time.sleep(0.3)
    assert 0 < run.spent.decoding < 0.6
    assert run.spent.cpu_seconds == run.spent.first_token_cpu + run.spent.decoding_cpu > 0


def test_the_output_layer_takes_one_row_a_token(monkeypatch):
    engine, rows = Engine(tiny_model(), chunk_tokens=16), []
    taken = engine.logits
    monkeypatch.setattr(engine, "logits", lambda hidden, **options: rows.append(len(hidden)) or taken(hidden, **options))
    list(engine.generate(prompt(40), new_tokens=5))
    assert rows == [1] * 5


def test_progress_is_told_of_the_tokens_that_go_through():
    engine, told = Engine(tiny_model(), chunk_tokens=16), []
    cache, tokens = engine.cache(), prompt(40)
    list(engine.generate(tokens, new_tokens=3, cache=cache, progress=told.append))
    assert told == [16, 16, 8]
    told.clear()
    list(engine.generate(tokens[:30] + prompt(20, seed=1), new_tokens=3, cache=cache, progress=told.append))
    assert told == [16, 4]  # the first 30 the cache holds


def test_selected_keys_in_decoding_are_those_of_attach():
    model, tokens = tiny_model(), prompt(60)
    engine = Engine(model, method=Method(0.3, estimator="oracle", decode="shared"), chunk_tokens=32)
    run = engine.generate(tokens, new_tokens=12)
    with attach(model, 0.3, estimator="oracle", decode="shared"):
        expected = greedy(model, tokens, 12)
    assert list(run) == expected
    assert expected != list(Engine(model, chunk_tokens=32).generate(tokens, new_tokens=12))


def test_the_padding_of_int8_blocks_changes_neither_scales_nor_lists():
    """A prompt's last chunk, in blocks that still hold rows of longer prompts with other activations."""
    model, tokens = MODELS["qwen2"](), prompt(90)
    method, form = Method(0.3, estimator="int8_fused"), BlockForm("w8a8", smooth=0.5)
    engine = Engine(model, method=method, form=form, ranges=ranges(model), chunk_tokens=128)
    first = logits(engine, tokens)
    kept = engine.attention.counters.density
    for seed in range(1, 4):
        logits(engine, prompt(128, seed))
    again = logits(engine, tokens)
    assert again.equal(first)
    assert 0.3 < kept < 0.6


def test_drafts_save_passes_and_change_no_token():
    model = tiny_model()
    tokens = prompt(12) * 4
    engine = Engine(model, chunk_tokens=32)
    plain = list(engine.generate(tokens, new_tokens=60))
    for most in (1, 4, 7):
        cache = engine.cache()
        run = engine.generate(tokens, new_tokens=60, drafts=PromptLookup(ngram=2, most=most), cache=cache)
        assert list(run) == plain
        assert cache.tokens == tokens + plain[:-1]
        assert 0 < run.spent.accepted_tokens <= run.spent.drafted_tokens
    stop = plain[30]
    drafted = list(engine.generate(tokens, new_tokens=60, stop={stop}, drafts=PromptLookup()))
    assert drafted == plain[: plain.index(stop) + 1]


class _Foreseen(PromptLookup):
    """Drafts what comes: the next tokens of `answer`, behind a prompt."""

    def __init__(self, answer: list[int], prompt_tokens: int):
        super().__init__()
        self._answer, self._made = answer, -prompt_tokens

    def add(self, tokens) -> None:
        self._made += len(tokens)

    def draft(self) -> list[int]:
        return self._answer[self._made :][: self.most]


def test_drafts_are_refused_where_rows_of_refused_ones_would_count():
    engine = Engine(tiny_model(), method=Method(0.3, estimator="h2o", decode="shared"), chunk_tokens=16)
    with pytest.raises(InputError, match="drafts: expected an estimator that ranks by present rows, got H2O"):
        engine.generate(prompt(20), new_tokens=4, drafts=PromptLookup())
    dense = Engine(tiny_model(), method=Method(0.3, estimator="h2o"), chunk_tokens=16)
    assert len(list(dense.generate(prompt(20), new_tokens=4, drafts=PromptLookup()))) == 4
    with pytest.raises(
        InputError, match="drafts: expected fewer than the engine's chunk_tokens=16, which check them at once, got"
    ):
        dense.compile(20, drafts=16)


def test_drafts_behind_a_stop_token_are_not_counted():
    engine, tokens = Engine(tiny_model(), chunk_tokens=16), prompt(12)
    answer = list(engine.generate(tokens, new_tokens=30))
    for stop in answer[:20]:
        run = engine.generate(tokens, new_tokens=30, stop={stop}, drafts=_Foreseen(answer, len(tokens)))
        made = list(run)
        assert made == answer[: answer.index(stop) + 1]
        own, rest = divmod(len(made) - 1, 5)  # after the first token a pass makes four drafts and one more
        assert run.spent.accepted_tokens == 4 * own + rest


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=40), ngram=st.integers(1, 4), most=st.integers(1, 5))
def test_drafts_are_what_followed_the_longest_known_end(text, ngram, most):
    lookup = PromptLookup(ngram, most)
    lookup.add(text)
    expected = []
    for length in range(min(ngram, len(text)), 0, -1):
        places = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if places:
            expected = text[places[-1] :][:most]
            break
    assert lookup.draft() == expected


def test_an_error_on_the_way_leaves_the_cache_as_it_was(monkeypatch):
    model, tokens = tiny_model(), prompt(40)
    engine = Engine(model, method=Method(0.4, estimator="quest"), chunk_tokens=16)
    expected, cache = list(engine.generate(tokens, new_tokens=6)), engine.cache()
    engine.forward(cache, tokens[:16])
    blocks, finish = engine._blocks[16], engine._blocks[16].finish
    monkeypatch.setattr(blocks, "finish", lambda layer, attended: finish(layer, attended) if layer == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.forward(cache, tokens[16:32])
    monkeypatch.undo()
    assert cache.tokens == tokens[:16]
    assert list(engine.generate(tokens, new_tokens=6, cache=cache)) == expected


@given(seed=st.integers(0, 50), top_k=st.integers(0, 12), top_p=st.floats(0.05, 1), temperature=st.floats(0.2, 3))
def test_sampling_keeps_the_likeliest(seed, top_k, top_p, temperature):
    values = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    kept = Sampling(temperature, top_k, top_p).probabilities(values)
    torch.testing.assert_close(kept.sum(), torch.tensor(1.0))
    order = values.argsort(descending=True).tolist()
    allowed = order[: top_k or 10]
    weights = (values[allowed] / temperature).double().softmax(0)
    fewest = int(kept.count_nonzero())
    assert set(kept.nonzero()[:, 0].tolist()) == set(allowed[:fewest])
    assert weights[: fewest - 1].sum() < top_p + 1e-6
    assert weights[:fewest].sum() > top_p - 1e-6
    torch.testing.assert_close(kept[allowed[:fewest]].double(), weights[:fewest] / weights[:fewest].sum(), rtol=1e-4, atol=1e-6)


def test_the_smallest_temperature_is_greedy():
    logits = torch.tensor([20.0, 10.0, 19.0])
    assert Sampling(1e-300).probabilities(logits).tolist() == [1, 0, 0]
    assert Sampling(1e-39, top_p=0.5).next(logits, torch.Generator()) == 0


def test_a_seed_draws_the_same_tokens_again():
    engine, tokens = Engine(tiny_model(), chunk_tokens=16), prompt(20)
    first, other = Sampling(1.0, seed=0), Sampling(1.0, seed=1)
    drawn = [list(engine.generate(tokens, new_tokens=20, sampling=sampling)) for sampling in (first, first, Sampling(1.0), other)]
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]
    likeliest = list(engine.generate(tokens, new_tokens=20))
    assert list(engine.generate(tokens, new_tokens=20, sampling=Sampling(5.0, top_k=1))) == likeliest


@pytest.mark.parametrize("temperature", [0.3, 0.7])
def test_drafts_change_no_token_that_is_drawn(temperature):
    """Also where some drafts are drawn and some are not."""
    engine, tokens, sampling = Engine(tiny_model(), chunk_tokens=16), [*range(5, 15)] * 4, Sampling(temperature, seed=3)
    plain = engine.generate(tokens, new_tokens=60, sampling=sampling)
    drafted = engine.generate(tokens, new_tokens=60, sampling=sampling, drafts=PromptLookup(1, 4))
    assert list(drafted) == list(plain)
    assert 0 < drafted.spent.accepted_tokens < drafted.spent.drafted_tokens
    assert drafted.cache.tokens == plain.cache.tokens


def test_a_prompt_takes_its_memory_once():
    engine = Engine(tiny_model(), chunk_tokens=16)
    run = engine.generate(prompt(400), new_tokens=8)
    token = iter(run)
    next(token)
    held = [memory.data_ptr() for memory in run.cache._held]
    assert run.cache.capacity == 407
    list(token)
    assert [memory.data_ptr() for memory in run.cache._held] == held


def test_inference_mode_changes_nothing():
    """Torch forbids to write to what was made in it, and the cache is written to."""
    engine, tokens = Engine(tiny_model(), chunk_tokens=16), prompt(40)
    expected, answer = logits(engine, tokens), list(engine.generate(tokens, new_tokens=6))
    with torch.inference_mode():
        assert logits(engine, tokens).equal(expected)
        assert list(engine.generate(tokens, new_tokens=6)) == answer


def test_logits_of_too_long_a_prompt_are_refused_before_the_first_chunk():
    engine = Engine(tiny_model(), chunk_tokens=16)
    most = engine.decoder.shape.context_tokens
    with pytest.raises(InputError, match=f"context is {most} tokens, got {most + 1}"):
        next(engine.prefill_chunks(torch.zeros(most + 1, dtype=torch.int64)))


def ranges(model):
    return observe_block_ranges(model, torch.tensor([prompt(64, seed=9)]), chunk_tokens=32)


@pytest.mark.parametrize("family", MODELS)
def test_the_torch_twin_of_the_blocks_computes_the_model(family):
    model, tokens = MODELS[family](), prompt(40)
    decoder, hidden = read_decoder(model), None
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
        hidden = decoder.embedding[tokens]
        for layer in decoder.layers:
            q, k, v = reference.projected(decoder, layer, hidden)
            hidden = reference.finished(decoder, layer, dense(q, k, v, causal_offset=0, scale=decoder.scale), hidden)
        found = reference.normed(decoder, hidden, decoder.final_norm) @ decoder.head.T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@given(alpha=st.floats(0, 1), seed=st.integers(0, 20))
@settings(max_examples=15)
def test_equalisation_changes_no_product(alpha, seed):
    """A layer whose channels are of very different sizes, before and after."""
    torch.manual_seed(seed)
    decoder = read_decoder(MODELS["qwen2"]())
    layer, hidden = decoder.layers[0], torch.randn(12, decoder.hidden) * torch.logspace(-1, 1, decoder.hidden)
    attended = torch.randn(decoder.shape.heads, 12, decoder.shape.head_dim)
    sizes = {"qkv": decoder.hidden, "out": attended[:, 0].numel(), "mlp": decoder.hidden, "down": decoder.intermediate}
    given_ranges = {point: torch.rand(size) * 10 + 1e-3 for point, size in sizes.items()}
    made, found = equalised(layer, given_ranges, decoder.shape, alpha)
    before, after = (reference.projected(decoder, one, hidden) for one in (layer, made))
    torch.testing.assert_close(after[:2], before[:2], rtol=1e-4, atol=1e-4)
    factor = given_ranges["out"] / found["out"]  # V is divided by what its channels' weights are multiplied with
    by_head = factor.view(decoder.shape.heads, 1, -1)
    torch.testing.assert_close(
        after[2] * by_head[:: decoder.shape.heads // decoder.shape.kv_heads], before[2], rtol=1e-4, atol=1e-4
    )
    outs = [reference.finished(decoder, one, x, hidden) for one, x in ((layer, attended), (made, attended / by_head))]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-3, atol=1e-3)


def test_the_ranges_are_the_largest_of_each_channel():
    model = MODELS["llama"]()
    seen = []
    hook = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    found = ranges(model)
    hook.remove()
    torch.testing.assert_close(found.of(1)["down"], torch.cat(seen, 1)[0].abs().amax(0))


@pytest.mark.parametrize("smooth", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("weights", ["inputs", "constants"])
@pytest.mark.parametrize("family", MODELS)
def test_int8_blocks_stay_near_float32(family, weights, smooth):
    model, tokens = MODELS[family](), prompt(64, seed=9)
    exact = logits(Engine(model, chunk_tokens=32), tokens)
    form = BlockForm("w8a8", weights, smooth=smooth)
    found = logits(Engine(model, form=form, ranges=ranges(model), chunk_tokens=32), tokens)
    error = (found - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.15


@pytest.mark.parametrize("weights", ["inputs", "constants"])
def test_every_projection_is_multiplied_in_int8_or_it_is_an_error(weights, monkeypatch):
    """Without exact INT8 products the same integers are multiplied in float32."""
    model, found = tiny_model(), {}
    monkeypatch.setattr(runner, "products", lambda compiled: found.setdefault(compiled, products(compiled)))
    form, options = BlockForm("w8a8", weights), {"ranges": ranges(model), "chunk_tokens": 16}
    engine = Engine(model, form=form, **options)
    logits(engine, prompt(16))
    graphs = {"inputs": 1, "constants": len(read_decoder(model).layers)}[weights]  # weights as inputs: one for all layers
    assert [len(of) for of in found.values()] == [1, 4] * graphs  # Q, K and V in one; output, gate, up, down
    assert {kind.rpartition("_")[2] for of in found.values() for kind in of} == {"i8" if multiplies_exactly() else "f32"}
    if multiplies_exactly():
        monkeypatch.setattr(runner, "products", lambda compiled: ["brgemm_avx512_f32"])
        with pytest.raises(InputError, match="expected 1 products in INT8, but the CPU plugin compiled brgemm_avx512_f32"):
            logits(Engine(model, form=form, **options), prompt(16))


@pytest.mark.parametrize(("precision", "least", "most"), [("w8", 1e-4, 0.05), ("w4", 0.02, 0.5), ("bfloat16", 1e-4, 0.05)])
def test_other_precisions_round_as_far_as_they_say(precision, least, most):
    model, tokens = MODELS["qwen2"](), prompt(40)
    exact = logits(Engine(model, chunk_tokens=32), tokens)
    engine = Engine(model, form=BlockForm(precision, "constants", group=32), chunk_tokens=32)
    if precision == "bfloat16" and "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        with pytest.raises(InputError, match="expected products in bfloat16"):
            logits(engine, tokens)
        return
    found = logits(engine, tokens)
    assert least < (found - exact).norm() / exact.norm() < most


def test_token_ids_may_come_in_a_tensor():
    engine = Engine(tiny_model())
    expected = list(engine.generate(prompt(9), new_tokens=4))
    assert list(engine.generate(torch.tensor(prompt(9)), new_tokens=4)) == expected
    assert (
        list(engine.generate(prompt(9), new_tokens=4, stop=torch.tensor(expected[1:2])))
        == expected[: expected.index(expected[1]) + 1]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: Engine(model, form=BlockForm("w8a8")), "ranges: expected a BlockRanges"),
        (lambda model: Engine(model, form=BlockForm("w8a8"), ranges=ranges(MODELS["llama"]())), "they are of another model"),
        (lambda model: BlockForm("w4"), "set engine.weights=constants"),
        (lambda model: Engine(model, form=BlockForm("w4", "constants")), "set engine.group=32"),
        (lambda model: BlockForm("float32", smooth=0.5), "set engine.precision=w8a8"),
        (lambda model: BlockForm("int8"), "expected one of float32, bfloat16, w8a8, w8, w4"),
        (lambda model: Engine(model, chunk_tokens=0), "chunk_tokens: expected an integer of 1"),
        (lambda model: Engine(model, attention_dtype="float16"), "attention_dtype: expected one of float32, bfloat16"),
        (lambda model: Engine(model).generate(prompt(500), new_tokens=14), "the model's context is 512 tokens"),
        (lambda model: Engine(model).generate([]), "expected at least one token"),
        (lambda model: Engine(model).generate([128]), "expected token ids from 0 to 127"),
        (lambda model: Engine(model).generate([1.5]), "prompt: expected token ids in one sequence"),
        (lambda model: Engine(model).generate(torch.tensor([[1, 2]])), "prompt: expected token ids in one sequence"),
        (lambda model: Engine(model).generate([1], stop=2), "stop: expected a sequence"),
        (lambda model: Engine(model).generate([1], stop=["."]), "stop: expected token ids in one sequence"),
        (
            lambda model: Engine(model, chunk_tokens=4).generate([1], drafts=PromptLookup(most=4)),
            "drafts: expected fewer than the engine's chunk_tokens=4",
        ),
        (lambda model: [list(run) for run in [Engine(model).generate([1], new_tokens=1)] * 2], "iterated over before"),
        (lambda model: Sampling(-1), "temperature: expected a number of at least 0"),
        (lambda model: Sampling(top_p=0), "top_p: expected a share above 0"),
    ],
)
def test_what_cannot_be_run_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make(tiny_model())


def test_other_models_are_refused_by_name():
    model = tiny_model()
    model.config.model_type = "gemma"
    with pytest.raises(InputError, match="expected a model of llama, qwen2, qwen3, got gemma"):
        Engine(model)
    model = tiny_model()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(InputError, match="full attention in every layer"):
        Engine(model)
    model = tiny_model()
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(InputError, match="got dynamic, which depends on the length"):
        Engine(model)
    model = tiny_model()
    model.model.layers[0].self_attn.o_proj.bias = torch.nn.Parameter(torch.ones(64))
    with pytest.raises(InputError, match=r"expected no bias in self_attn\.o_proj"):
        Engine(model)
