"""The specification against what is even simpler: torch's own attention, and loops over numbers."""

import math

import pytest
import torch

from shadowattn.errors import InputError
from shadowattn.reference import dense_attention, select, topk_attention
from tests.tensors import HEADS, integer_qkv, qkv


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_dense_equals_torch(heads, kv_heads):
    q, k, v = qkv(heads, kv_heads, 20, 33, 16)
    seen = torch.arange(33) <= 13 + torch.arange(20)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], seen, enable_gqa=True)[0]
    torch.testing.assert_close(dense_attention(q, k, v, causal_offset=13), expected, atol=1e-5, rtol=1e-5)


def test_topk_is_what_loops_compute():
    q, k, v = integer_qkv(2, 1, 7, 11, 8)
    out = topk_attention(q, k, v, 0.3, causal_offset=4)
    for head in range(2):
        for row in range(7):
            visible = 4 + row + 1
            scores = [float(q[head, row] @ k[0, key]) for key in range(visible)]
            keep = math.ceil(0.3 * visible)
            best = sorted(range(visible), key=lambda key: (-scores[key], key))[:keep]
            weights = [math.exp(scores[key] / math.sqrt(8)) for key in best]
            expected = sum(w * v[0, key] for w, key in zip(weights, best, strict=True)) / sum(weights)
            torch.testing.assert_close(out[head, row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_score", ["first_row", "max"])
@pytest.mark.parametrize("query_block", [1, 4, 32])
def test_retention_one_is_dense(query_block, block_score):
    q, k, v = qkv(4, 2, 45, 50, 16)
    out = topk_attention(q, k, v, 1.0, causal_offset=5, query_block=query_block, block_score=block_score)
    torch.testing.assert_close(out, dense_attention(q, k, v, causal_offset=5))


def test_first_row_of_a_block_decides():
    scores = torch.tensor([[[9.0, 1, 5, 0, 0, 0], [0, 9, 9, 9, 0, 0], [0, 9, 9, 9, 9, 9]]])
    chosen = select(scores, torch.tensor([0.5]), torch.tensor([4, 5, 6]), 3, "first_row")
    # The first row sees four keys and keeps 0 and 2; the rows after it add what lies between it and them.
    assert chosen.int().tolist() == [[[1, 0, 1, 0, 0, 0], [1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 1, 1]]]


def test_max_pools_over_the_rows_that_see_a_key():
    scores = torch.tensor([[[9.0, 1, 5, 0, 99, 99], [0, 8, 0, 0, 0, 99], [0, 0, 0, 0, 7, 1]]])
    chosen = select(scores, torch.tensor([0.5]), torch.tensor([4, 5, 6]), 3, "max")
    # Three of six keys: the first row's own (3) always, then 0 with 9 and 1 with 8; the future's 99 count for nothing.
    assert chosen.int().tolist() == [[[1, 1, 0, 1, 0, 0]] * 3]


@pytest.mark.parametrize("offset", [-1, 6])
def test_refuses_an_offset_without_own_keys(offset):
    with pytest.raises(InputError, match="causal_offset"):
        dense_attention(*qkv(2, 1, 5, 10, 8), causal_offset=offset)


def test_refuses_heads_that_do_not_divide():
    with pytest.raises(InputError, match="multiple of G"):
        dense_attention(*qkv(3, 2, 5, 10, 8), causal_offset=5)
