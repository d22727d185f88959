"""Lists that are made apart from attention: the same as those of one call, and refused where they do not fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowattn import Method
from shadowattn.errors import InputError
from shadowattn.online.attention import Request, SparseAttention
from shadowattn.online.cache import LayerCache
from tests.tiny import tiny_model

MODEL = tiny_model()
CONFIG = MODEL.config
RETENTION = [[1.0, 0.2, 0.5, 0.3], [0.4] * 4, [1.0] * 4]


def tensors(rows: int, keys: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    dim = CONFIG.hidden_size // CONFIG.num_attention_heads
    heads = CONFIG.num_attention_heads, CONFIG.num_key_value_heads, CONFIG.num_key_value_heads
    return [torch.randn(1, count, rows if at == 0 else keys, dim, generator=generator) for at, count in enumerate(heads)]


def attention(estimator: str = "oracle", **options):
    made = Method(0.5, estimator=estimator).attention(MODEL).estimator
    return SparseAttention(RETENTION, made, chunk_tokens=16, **options)


@settings(max_examples=40, deadline=None)
@given(
    estimator=st.sampled_from(["oracle", "int8_fused", "quest", "sign1"]),
    rows=st.integers(1, 40),
    before=st.integers(0, 60),
    query_block=st.sampled_from([1, 4]),
    layer=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_ranked_apart_and_at_once_are_the_same(estimator, rows, before, query_block, layer, seed):
    """Counters too, with heads that go dense beside them; to rounding where one task makes lists and attends to them."""
    q, k, v = tensors(rows, before + rows, seed)
    together, apart = attention(estimator, query_block=query_block), attention(estimator, query_block=query_block)
    expected = together(layer, q, k, v, 0.2)
    cache = LayerCache()
    lists = apart.rank(layer, q, k, 0.2, Request(caches=(cache,)))
    assert (apart.counters.sparse_rows, apart.counters.dense_rows) == (0, 0)
    out = apart(layer, q, k, v, 0.2, Request(caches=(cache,), lists=lists))
    torch.testing.assert_close(out, expected, **({} if estimator == "int8_fused" else {"rtol": 0, "atol": 0}))
    assert apart.counters == together.counters


def test_lists_of_other_tensors_decide_what_is_attended_to():
    """Each row attends, with its own q and k, to the keys that the others ranked first."""
    (q, k, v), (early_q, early_k, _) = tensors(8, 24, 0), tensors(8, 24, 1)
    made = attention()
    lists = made.rank(1, early_q, early_k, 0.2)
    out = made(1, q, k, v, 0.2, Request(lists=lists))
    (chunk,) = lists[0]
    for head in range(4):
        for row in range(8):
            kept = chunk.list_of(head, row).long()
            weights = torch.softmax(q[0, head, row] @ k[0, head // 2, kept].T * 0.2, -1)
            torch.testing.assert_close(out[0, head, row], weights @ v[0, head // 2, kept])


def test_lists_that_do_not_fit_are_refused():
    q, k, v = tensors(8, 24, 0)
    made = attention()
    lists = made.rank(1, q, k, 0.2)
    with pytest.raises(InputError, match=r"request\.lists: expected lists of 4 heads for rows 15 to 22, got those of other rows"):
        made(1, q, k[:, :, :23], v[:, :, :23], 0.2, Request(lists=lists))
    with pytest.raises(InputError, match=r"request\.lists: expected lists of 3 heads"):
        made(0, q, k, v, 0.2, Request(lists=lists))
    with pytest.raises(InputError, match=r"request\.lists: expected none in a decoding step"):
        made(1, q[:, :, :1], k, v, 0.2, Request(decode=True, lists=lists))
    with pytest.raises(InputError, match=r"request\.lists: expected those of 1 sequences, got 2"):
        made(1, q, k, v, 0.2, Request(lists=lists * 2))
    with pytest.raises(InputError, match=r"request\.lists: expected those of 1 chunks of rows, got 2"):
        made(1, q, k, v, 0.2, Request(lists=(lists[0] * 2,)))
    with pytest.raises(InputError, match=r"request\.lists: expected none, as no head goes sparse, got some"):
        made(2, q, k, v, 0.2, Request(lists=lists))
    with pytest.raises(InputError, match=r"request\.lists: expected lists of 4 heads"):
        attention(query_block=4)(1, q, k, v, 0.2, Request(lists=lists))
