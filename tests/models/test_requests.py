"""What is derived from keys stays with them: continued, cropped, reordered, batched otherwise, or beside another prompt."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import shadowattn
from shadowattn.errors import InputError
from shadowattn.models import decoding, prompt
from shadowattn.models.requests import Place, decoding_rows
from shadowattn.online.cache import LargestKey, LayerCache
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from tests.profiles import profile_for
from tests.tensors import qkv
from tests.tiny import tiny_model

MODEL = tiny_model()
OPERATIONS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 40)),
    st.tuples(st.just("crop"), st.integers(1, 30)),
    st.tuples(st.just("reorder"), st.sampled_from([(0, 1), (1, 0), (0, 0), (1, 1)])),
    st.tuples(st.just("write"), st.integers(0, 20)),
    st.tuples(st.just("switch"), st.just(0)),
)


def feed(cache, ids):
    return MODEL(input_ids=ids, past_key_values=cache, use_cache=True).logits


@settings(max_examples=40, deadline=None)
@given(operations=st.lists(OPERATIONS, min_size=2, max_size=8), inference=st.booleans(), seed=st.integers(0, 99))
def test_any_history_gives_what_an_attachment_without_one_gives(operations, inference, seed):
    """Two caches of two sequences each; every forward pass is repeated by an attachment that has seen nothing before."""
    generator = torch.Generator().manual_seed(seed)
    caches = [DynamicCache(config=MODEL.config) for _ in range(2)]
    with torch.inference_mode() if inference else torch.no_grad():
        with shadowattn.attach(MODEL, 0.2, chunk_tokens=16):
            histories = []
            for name, value in [("feed", 33), *operations, ("feed", 20)]:
                cache = caches[0]
                length = cache.get_seq_length()
                if name == "switch":
                    caches.reverse()
                elif name == "feed":
                    ids = torch.randint(0, 60, (2, value), generator=generator)
                    before = copy.deepcopy(cache)
                    histories.append((before, ids, feed(cache, ids)))
                elif name == "crop" and value < length:
                    cache.crop(-value)
                elif name == "reorder" and length:
                    cache.reorder_cache(torch.tensor(value))
                elif name == "write" and value < length:
                    cache.layers[0].keys[:, :, value] *= -3
        for before, ids, seen in histories:
            with shadowattn.attach(MODEL, 0.2, chunk_tokens=16):
                torch.testing.assert_close(seen, feed(before, ids), atol=1e-5, rtol=1e-5)


class Counted(LargestKey):
    """Counts the keys that it looks at."""

    looked_at = 0

    def extend(self, k):
        Counted.looked_at += k.shape[1] - self.length
        super().extend(k)


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr("shadowattn.online.chunk.LargestKey", Counted)
    Counted.looked_at = 0
    return Counted


@torch.no_grad()
def test_keys_are_looked_at_once(counted):
    cache, ids = DynamicCache(config=MODEL.config), torch.arange(60)[None] % 50
    with shadowattn.attach(MODEL, profile_for(MODEL, 0.2), estimator=Int8Tensor(), chunk_tokens=16):
        for part in ids.split(20, 1):
            feed(cache, part)
        assert counted.looked_at == 2 * 60  # layers
        cache.crop(-10)
        feed(cache, ids[:, :5])
        assert counted.looked_at <= 2 * (60 + 64 + 5)  # what was derived in one piece with the cropped keys is derived again
        MODEL(ids)
        assert counted.looked_at <= 2 * (60 + 64 + 5 + 60)


@torch.no_grad()
def test_what_was_derived_goes_with_the_cache():
    cache, kept = DynamicCache(config=MODEL.config), []
    with shadowattn.attach(MODEL, 0.2, chunk_tokens=16) as run:
        run.observers = (lambda seen: kept.append(seen.chunk.cache),)
        feed(cache, torch.arange(40)[None])
        alive = [weakref.ref(one) for one in kept]
        kept.clear()
        del cache
        gc.collect()
        assert not any(one() for one in alive)


def test_memory_is_known_again_only_where_it_is_the_same():
    keys = torch.randn(2, 1, 10, 8)
    place = Place.of(keys)
    assert place.shared_with(keys) == 10
    assert place.shared_with(keys[:, :, :7]) == 7
    assert place.shared_with(keys[:, :, 1:]) == 0
    assert place.shared_with(keys[:1]) == 0
    assert place.shared_with(keys.clone()) == 0
    keys[0, 0, 3, 3] = 1.0
    assert place.shared_with(keys) == 0
    place = Place.of(keys)
    shape = keys.shape
    del keys
    assert place.shared_with(torch.randn(shape)) == 0  # most likely at the same address


def test_a_single_row_behind_a_cache_is_a_decoding_step_unless_it_is_said_to_be_a_prompts():
    assert decoding_rows(1, 40) == 1
    assert decoding_rows(1, 0) == 0
    assert decoding_rows(2, 40) == 0
    with prompt():
        assert decoding_rows(1, 40) == 0
    assert decoding_rows(1, 40) == 1


def test_rows_that_verify_drafts_are_decoding_steps_where_that_is_said():
    with decoding():
        assert decoding_rows(4, 40) == 4
        assert decoding_rows(4, 40, logits_to_keep=4) == 4
        assert decoding_rows(40, 0) == 0
        assert decoding_rows(43, 0, logits_to_keep=4) == 3
        with prompt():
            assert decoding_rows(4, 40) == 0


@torch.no_grad()
@pytest.mark.parametrize("decode", ["dense", "shared"])
def test_drafts_change_no_token(decode):
    """Greedy decoding with drafts looked up in the prompt gives what it gives without; the prompt itself ends in drafts."""
    model = tiny_model(vocab=16)  # few tokens, so that many n-grams come again
    rows = []
    for seed in range(6):
        ids = torch.randint(1, 16, (1, 48), generator=torch.Generator().manual_seed(seed))
        with shadowattn.attach(model, 0.1, estimator="oracle", chunk_tokens=16, decode=decode) as run:
            how = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            expected = model.generate(ids, **how)
            before = run.counters.sparse_rows, run.counters.decode_rows
            with decoding():
                assert model.generate(ids, prompt_lookup_num_tokens=3, **how).equal(expected)
            assert run.counters.sparse_rows == 2 * before[0]  # the prompts' rows, drafts not among them
            rows.append(run.counters.decode_rows > 2 * before[1])
    assert any(rows)  # some drafts were wrong


@torch.no_grad()
def test_rows_that_may_verify_drafts_are_refused_where_nobody_says_what_they_are():
    ids = torch.arange(40)[None] % 8 + 1
    with shadowattn.attach(MODEL, 0.2, chunk_tokens=16) as run:
        with pytest.raises(InputError, match=r"logits_to_keep=4: .*decoding\(\).*prompt\(\)"):
            MODEL.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=8, do_sample=False)
        with pytest.raises(InputError, match="logits_to_keep=2"):
            MODEL(ids, logits_to_keep=2)
        MODEL(ids, logits_to_keep=1)
        MODEL(ids)
        before = run.counters.sparse_rows
        with prompt():
            MODEL(ids, logits_to_keep=2)
        assert (run.counters.sparse_rows - before, run.counters.decode_rows) == (2 * 4 * 40, 0)
    MODEL(ids, logits_to_keep=2)


@pytest.mark.parametrize("pieces", [7, 16, 49, 50])  # 50 tokens: the last piece has one row, two, one, or is all there is
def test_generate_reads_its_prompt_in_pieces(pieces):
    ids = torch.randint(0, 60, (1, 50), generator=torch.Generator().manual_seed(2))
    how = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with shadowattn.attach(MODEL, 0.2, estimator="oracle") as whole:
        expected = MODEL.generate(ids, **how)
    with shadowattn.attach(MODEL, 0.2, estimator="oracle") as run:
        got = MODEL.generate(ids, prefill_chunk_size=pieces, **how)
    counts = [(one.sparse_rows, one.decode_rows) for one in (run.counters, whole.counters)]
    assert counts[0] == counts[1]
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_end_of_a_prompt_may_be_one_token():
    ids = torch.arange(41)[None] % 50
    for context, rows in ((prompt(), (8, 0)), (torch.no_grad(), (0, 8))):
        cache = DynamicCache(config=MODEL.config)
        with shadowattn.attach(MODEL, 0.2, chunk_tokens=16) as run:
            feed(cache, ids[:, :40])
            before = run.counters.sparse_rows
            with context:
                feed(cache, ids[:, 40:])
        assert (run.counters.sparse_rows - before, run.counters.decode_rows) == rows


def test_keys_that_a_cache_has_not_are_no_beginning():
    cache, (_, k, _) = LayerCache(), qkv(1, 1, 1, 20, 8)
    cache.derived("largest key", LargestKey, k)
    with pytest.raises(ValueError, match="largest key: derived of 20 keys, got 10"):
        cache.derived("largest key", LargestKey, k[:, :10])


@pytest.mark.parametrize("length", range(0, 21, 5))
def test_the_largest_key_is_that_of_the_keys_that_are_left(length):
    cache, (_, k, _) = LayerCache(), qkv(1, 3, 1, 20, 8)
    for end in (5, 12, 20):
        cache.derived("largest key", LargestKey, k[:, :end])
    cache.crop(length)
    other = torch.cat([k[:, :length], 5 * k[:, length:].flip(1)], 1)
    assert cache.derived("largest key", LargestKey, other).scales().equal(other.abs().amax((1, 2)) / 127)
