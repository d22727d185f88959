import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shadowattn
from shadowattn.errors import InputError
from shadowattn.online.cache import LayerCache
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.h2o import H2O
from shadowattn.online.estimators.pages import ALWAYS
from tests.tensors import qkv

HEADS, KV_HEADS, DIM, KEYS = 4, 2, 8, 24


def chunks(sizes: list[int], cache: LayerCache, retention: float = 0.4):
    """A prompt of 24 tokens, or the beginning of one, in chunks."""
    q, k, _ = qkv(HEADS, KV_HEADS, KEYS, KEYS, DIM)
    start = 0
    for size in sizes:
        end = start + size
        yield Chunk.of(2 * q[:, start:end], 2 * k[:, :end], cache=cache, retention=retention)
        start = end


def plain(sizes: list[int], recent: float, retention: float = 0.4) -> list[torch.Tensor]:
    """Scores of every chunk, −∞ for keys that a row does not see: attention of all rows of earlier chunks, added up."""
    made, total = [], torch.zeros(HEADS, KEYS, dtype=torch.float64)
    for chunk in chunks(sizes, LayerCache(), retention):
        scores = torch.full((HEADS, len(chunk.positions), chunk.keys), -torch.inf, dtype=torch.float64)
        paid = torch.zeros_like(total)
        for head in range(HEADS):
            for row, position in enumerate(chunk.positions.tolist()):
                near = max(1, math.ceil(recent * math.ceil(retention * (position + 1))))
                for key in range(position + 1):
                    distance = position - key
                    scores[head, row, key] = ALWAYS * (2 - distance / near) if distance < near else total[head, key]
                logits = chunk.k[head // 2, : position + 1].double() @ chunk.q[head, row].double() * chunk.scale
                paid[head, : position + 1] += torch.softmax(logits, 0)
        total = total + paid
        made.append(scores)
    return made


def seen(scores: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return scores.double().masked_fill(torch.arange(chunk.keys) > chunk.positions[:, None], -torch.inf)


@settings(max_examples=20)
@given(cuts=st.sets(st.integers(1, KEYS - 1), max_size=4), recent=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_keys_score_what_rows_of_earlier_chunks_paid_them(cuts, recent):
    ends = [*sorted(cuts), KEYS]
    sizes, cache = [end - start for start, end in zip([0, *ends], ends, strict=False)], LayerCache()
    for chunk, expected in zip(chunks(sizes, cache), plain(sizes, recent), strict=True):
        estimator = H2O(recent)
        one_by_one = torch.cat([estimator.scores(chunk[[head]]) for head in range(HEADS)])
        for scores in (one_by_one, estimator.scores(chunk)):  # asked a second time, the chunk counts once
            torch.testing.assert_close(seen(scores, chunk), expected, rtol=1e-4, atol=1e-5)


def test_a_decode_keeps_no_more_than_it_needs_and_goes_back_to_the_prompt():
    sizes, cache = [8, 8, *[1] * 8], LayerCache()
    every = list(chunks(sizes, cache))
    expected = plain(sizes, 0.5)
    for chunk, right in zip(every, expected, strict=True):
        torch.testing.assert_close(seen(H2O().scores(chunk), chunk), right, rtol=1e-4, atol=1e-5)
    held = cache.held("attention received")._totals[0]
    assert [end for end, _, _ in held] == [8, 16, 23, 24]
    cache.crop(16)
    torch.testing.assert_close(seen(H2O().scores(every[2]), every[2]), expected[2], rtol=1e-4, atol=1e-5)


def test_a_prompt_cut_inside_a_chunk_forgets_that_chunk():
    cache = LayerCache()
    first, second = chunks([12, 12], cache)
    H2O().scores(first)
    cache.crop(7)
    torch.testing.assert_close(H2O(0.0).scores(second)[:, :, :11].unique(), torch.zeros(1))


def test_the_contract_holds():
    shadowattn.check_estimator(H2O())
    with pytest.raises(InputError, match=r"it depends on the chunk length.*sees = 'earlier_rows'"):
        shadowattn.check_estimator(type("Forgetful", (H2O,), {"sees": "row"})())


@pytest.mark.parametrize("estimator", ["h2o", "xattention", "vertical_slash"])
@pytest.mark.parametrize("score", ["leading_query", "pooled_query"])
def test_one_row_of_a_block_is_not_enough_for_what_goes_by_all(estimator, score):
    tensors = qkv(2, 1, 24, 24, 16)
    with pytest.raises(InputError, match=f"block_score={score}: scores one row of a block"):
        shadowattn.Method(0.2, estimator=estimator, query_block=8, block_score=score).attend(*tensors, causal_offset=0)
    shadowattn.Method(0.2, estimator=estimator, query_block=8, block_score="max").attend(*tensors, causal_offset=0)
