"""Lists made a layer early: those of what entered the layer before, and everything else as without."""

import time

import pytest
import torch

from shadowattn import Engine, Method
from shadowattn.engine import reference
from shadowattn.engine.ahead import AHEAD_STAGES
from shadowattn.errors import InputError
from shadowattn.evaluation.recall import top_keys
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.models.decoder import read_decoder
from shadowattn.online.attention import SparseAttention
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.pipeline import Pipeline
from tests.engine.test_engine import MODELS, logits, prompt
from tests.profiles import bank_for, profile_for
from tests.tiny import tiny_model

SPARSE = Method(0.3, estimator="oracle")


def defined(decoder, tokens: list[int], chunk: int, retention: float, first: int) -> torch.Tensor:
    """Logits by the definition: masks instead of lists, chunk by chunk, in plain torch."""
    held = [[] for _ in decoder.layers]
    outs = []
    for start in range(0, len(tokens), chunk):
        hidden = decoder.embedding[tokens[start : start + chunk]].float()
        positions = torch.arange(start, start + len(hidden))
        entered = None
        for index, layer in enumerate(decoder.layers):
            q, k, v = reference.projected(decoder, layer, hidden, start)
            ranking_q, ranking_k = (q, k) if index < first else reference.projected(decoder, layer, entered, start)[:2]
            earlier = held[index]
            scores = attention_scores(decoder, ranking_q, torch.cat([one[0] for one in earlier] + [ranking_k], 1))
            earlier.append((k, v))
            keys, values = (torch.cat([one[at] for one in earlier], 1) for at in (0, 1))
            own = attention_scores(decoder, q, keys) * decoder.scale
            kept = top_keys(scores, positions, retention)
            weights = torch.softmax(own.masked_fill(~kept, -torch.inf), -1)
            groups = decoder.shape.heads // decoder.shape.kv_heads
            entered = hidden
            hidden = reference.finished(decoder, layer, weights @ values.repeat_interleave(groups, 0), hidden)
        outs.append(reference.normed(decoder, hidden, decoder.final_norm) @ decoder.head.T)
    return torch.cat(outs)


def attention_scores(decoder, q, k):
    return q @ k.repeat_interleave(decoder.shape.heads // decoder.shape.kv_heads, 0).mT


@pytest.mark.parametrize("form", [BlockForm(), BlockForm(weights="constants")], ids=["inputs", "constants"])
@pytest.mark.parametrize("family", MODELS)
def test_a_layer_attends_to_what_entered_the_one_before_ranks_first(family, form):
    model, tokens = MODELS[family](), prompt(70)
    assert_defined(model, form, tokens, 1)


@pytest.mark.parametrize("form", [BlockForm(), BlockForm(weights="constants")], ids=["inputs", "constants"])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_so_it_does_behind_layers_that_look_ahead_too(first, form):
    assert_defined(tiny_model(layers=4), form, prompt(70), first)


def assert_defined(model, form, tokens, first):
    """With lists ahead and without, and both differ."""
    found = {}
    for ahead in (first, None):
        engine = Engine(model, method=SPARSE, form=form, chunk_tokens=32, look_ahead=ahead)
        expected = defined(read_decoder(model), tokens, 32, 0.3, ahead or 99)
        found[ahead] = logits(engine, tokens)
        assert (found[ahead] - expected).norm() / expected.norm() < 1e-4
    assert (found[first] - found[None]).abs().max() > 0.05


@pytest.mark.parametrize("estimator", ["int8_fused", "quest", "oracle", "sign1", "mean_keys"])
def test_nothing_of_a_guess_stays_in_the_cache(estimator):
    """What was derived of earlier keys is what would be derived of them anew; decoding steps that keep some keys read it too."""
    method, tokens = Method(0.4, estimator=estimator, decode="shared"), prompt(60)
    engine = Engine(tiny_model(), method=method, chunk_tokens=16, look_ahead=1)
    grown, anew = engine.cache(), engine.cache()
    for start in range(0, 60, 15):
        for derived in anew.derived:
            derived.clear()
        hidden = [engine.forward(cache, tokens[start : start + 15]) for cache in (grown, anew)]
        assert torch.equal(*hidden)
    assert list(engine.generate(tokens, new_tokens=6, cache=grown)) == list(engine.generate(tokens, new_tokens=6, cache=anew))


def test_what_ran_is_counted_and_timed_as_without():
    model, tokens = tiny_model(), prompt(50)
    engines = [Engine(model, method=SPARSE, chunk_tokens=16, look_ahead=ahead) for ahead in (1, None)]
    early, plain = (engine.generate(tokens, new_tokens=4) for engine in engines)
    for run in (early, plain):
        list(run)
    assert engines[0].attention.counters == engines[1].attention.counters
    assert set(early.spent.prefill) - set(plain.spent.prefill) == set(AHEAD_STAGES)
    assert set(early.spent.decode) == set(plain.spent.decode)


def test_in_inference_mode_too():
    engine, tokens = Engine(tiny_model(), method=Method(0.4), chunk_tokens=16, look_ahead=1), prompt(40)
    with torch.inference_mode():
        found = list(engine.generate(tokens, new_tokens=6))
    assert found == list(engine.generate(tokens, new_tokens=6))


def test_graphs_of_a_bank_are_those_that_were_compiled():
    """The worker's single thread has none compiled again, and a prompt gives the same logits again."""
    model, tokens = tiny_model(), prompt(60)
    bank = bank_for(model)
    engine = Engine(model, method=Method(profile_for(model, 0.3), bank), chunk_tokens=32, look_ahead=1)
    first = logits(engine, tokens)
    assert {compiled[-1] for compiled in bank._graphs} == {None}
    assert torch.equal(logits(engine, tokens), first)


def test_a_layer_whose_heads_are_all_dense_makes_no_lists():
    model, tokens = tiny_model(layers=3), prompt(40)
    profile = [[0.3] * 4, [1.0] * 4, [0.3] * 4]
    dense_beside = SparseAttention(profile, Oracle(), chunk_tokens=16)
    ahead, plain = (Engine(model, method=SPARSE, chunk_tokens=16, look_ahead=first) for first in (1, None))
    ahead._attention = dense_beside
    ahead._ahead = ahead._layers_ahead(1)
    assert ahead._ahead == {2}
    assert logits(ahead, tokens).isfinite().all()
    assert ahead.attention.counters.dense_rows == 4 * 40
    assert plain._ahead == frozenset()


def test_an_error_while_a_ranking_is_at_work_waits_for_it(monkeypatch):
    """What was derived is forgotten when nothing derives any more."""
    model, tokens = tiny_model(), prompt(40)
    engine = Engine(model, method=Method(0.4, estimator="quest"), chunk_tokens=16, look_ahead=1)
    expected, cache, ended = list(engine.generate(tokens, new_tokens=6)), engine.cache(), []
    engine.forward(cache, tokens[:16])
    rank = engine.attention.rank

    def slow(*arguments):
        time.sleep(0.2)
        lists = rank(*arguments)
        ended.append(True)
        return lists

    monkeypatch.setattr(engine.attention, "rank", slow)
    monkeypatch.setattr(type(engine.attention), "__call__", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.forward(cache, tokens[16:32])
    monkeypatch.undo()
    assert ended == [True]
    assert list(engine.generate(tokens, new_tokens=6, cache=cache)) == expected


def test_an_error_in_a_ranking_leaves_the_cache_as_it_was(monkeypatch):
    model, tokens = tiny_model(), prompt(40)
    engine = Engine(model, method=Method(0.4, estimator="quest"), chunk_tokens=16, look_ahead=1)
    expected, cache = list(engine.generate(tokens, new_tokens=6)), engine.cache()
    engine.forward(cache, tokens[:16])
    monkeypatch.setattr(engine.attention, "rank", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.forward(cache, tokens[16:32])
    monkeypatch.undo()
    assert cache.tokens == tokens[:16]
    assert list(engine.generate(tokens, new_tokens=6, cache=cache)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": SPARSE, "look_ahead": 0}, "look_ahead: expected an integer of 1 … 1, got 0"),
        ({"method": SPARSE, "look_ahead": 2}, "look_ahead: expected an integer of 1 … 1, got 2"),
        ({"look_ahead": 1}, "look_ahead: expected a method that leaves keys out from layer 1 on"),
        ({"method": Method(0.3, dense_above=0.2), "look_ahead": 1}, "look_ahead: expected a method that leaves keys out"),
        ({"method": Method(0.3, estimator="h2o"), "look_ahead": 1}, "look_ahead: .* got H2O, which goes by earlier ones"),
        ({"method": Method(0.3, pipeline=Pipeline("serial")), "look_ahead": 1}, "look_ahead: expected pipeline=batched"),
    ],
)
def test_what_cannot_look_ahead_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        Engine(tiny_model(), **options)
