"""Lists made a layer early: those of what entered the layer before, and everything else as without."""

import pytest
import torch

from shadowattn import Engine, Method
from shadowattn.engine import reference
from shadowattn.engine.ahead import AHEAD_STAGES
from shadowattn.errors import InputError
from shadowattn.evaluation.recall import top_keys
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.models.decoder import read_decoder
from tests.engine.test_engine import MODELS, logits, prompt
from tests.tiny import tiny_model

SPARSE = Method(0.3, estimator="oracle")


def defined(decoder, tokens: list[int], chunk: int, retention: float, first: int) -> torch.Tensor:
    """Logits by the definition: masks instead of lists, chunk by chunk, in plain torch."""
    held = [[], []]
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
@pytest.mark.parametrize("first", [1, None])
def test_a_layer_attends_to_what_entered_the_one_before_ranks_first(first, family, form):
    model, tokens = MODELS[family](), prompt(70)
    engine = Engine(model, method=SPARSE, form=form, chunk_tokens=32, look_ahead=first)
    expected = defined(read_decoder(model), tokens, 32, 0.3, 99 if first is None else first)
    found = logits(engine, tokens)
    assert (found - expected).norm() / expected.norm() < 1e-4
    if first is not None:
        assert (logits(Engine(model, method=SPARSE, form=form, chunk_tokens=32), tokens) - found).abs().max() > 0.1


@pytest.mark.parametrize("estimator", ["int8_fused", "quest", "oracle"])
def test_nothing_of_a_guess_stays_in_the_cache(estimator):
    """What was derived of earlier keys is what would be derived of them anew."""
    engine, tokens = Engine(tiny_model(), method=Method(0.4, estimator=estimator), chunk_tokens=16, look_ahead=1), prompt(60)
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
        ({"look_ahead": 1}, "look_ahead: expected a method that leaves keys out, got dense attention"),
        ({"method": Method(0.3, estimator="h2o"), "look_ahead": 1}, "look_ahead: .* got H2O, which adds up"),
    ],
)
def test_what_cannot_look_ahead_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        Engine(tiny_model(), **options)
