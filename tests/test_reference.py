"""The specification against what is even simpler: torch's own attention, and loops over numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.online.selection import BLOCK_SCORES
from shadowattn.reference import dense_attention, int8_attention, select, select_key_blocks, topk_attention
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


@pytest.mark.parametrize("block_score", BLOCK_SCORES)
@pytest.mark.parametrize("query_block", [1, 4, 32])
def test_retention_one_is_dense(query_block, block_score):
    q, k, v = qkv(4, 2, 45, 50, 16)
    out = topk_attention(q, k, v, 1.0, causal_offset=5, query_block=query_block, block_score=block_score)
    torch.testing.assert_close(out, dense_attention(q, k, v, causal_offset=5))


SCORES = torch.tensor([[[9.0, 1, 5, 0, 99, 99], [0, 12, 0, 0, 0, 99], [0, 11, 20, 0, 7, 1]]])


@pytest.mark.parametrize(
    ("block_score", "best"),
    [
        ("leading_query", 0),  # 9
        ("pooled_query", 2),  # 25 / 3
        ("max", 2),  # 20
        ("sum", 2),  # 25
    ],
)
def test_a_block_shares_its_best_keys_and_holds_its_own(block_score, best):
    """Rows that see 4, 5 and 6 keys keep 2, 3 and 3 of them: 6 pairs are the block's own, and one shared key makes 9."""
    chosen = select(SCORES, torch.tensor([0.5], dtype=torch.float64), torch.tensor([4, 5, 6]), 3, block_score)[0].int().tolist()
    assert chosen == [[int(key == best or 3 <= key <= row) for key in range(6)] for row in (3, 4, 5)]


def test_probabilities_are_of_each_row_and_over_what_it_sees():
    """The last row's scores are the largest, but spread over its keys; the first row is sure of key 0."""
    scores = torch.tensor([[[10.0, 0, 0, 0, 0], [100, 101, 101, 101, 101]]])
    retention, visible = torch.tensor([0.5], dtype=torch.float64), torch.tensor([4, 5])
    assert select(scores, retention, visible, 2, "sum")[0, 0].nonzero()[:, 0].tolist() == [0, 3]
    assert select(scores - torch.tensor([[[90.0], [0]]]), retention, visible, 2, "max")[0, 0].nonzero()[:, 0].tolist() == [1, 3]
    hidden = scores - torch.tensor([[[90.0], [0]]])
    assert select(hidden, retention, visible, 2, "probability")[0, 0].nonzero()[:, 0].tolist() == [0, 3]
    later = hidden.clone()
    later[0, 0, 4] = 1e6  # a key that the first row does not see takes none of its probability
    assert select(later, retention, visible, 2, "probability").equal(select(hidden, retention, visible, 2, "probability"))


@pytest.mark.parametrize("block_score", BLOCK_SCORES)
@given(
    rows=st.integers(1, 40),
    offset=st.integers(0, 60),
    query_block=st.integers(2, 40),
    retention=st.floats(0.01, 1.0),
    min_budget=st.sampled_from([1, 16]),
    seed=st.integers(0, 99),
)
def test_sharing_changes_which_keys_are_kept_and_not_how_many(
    block_score, rows, offset, query_block, retention, min_budget, seed
):
    """A block holds its causal diagonal and a key before it, and else as many (row, key) pairs as the rows' own lists."""
    scores = torch.randn(1, rows, offset + rows, generator=torch.Generator().manual_seed(seed))
    visible, retentions = offset + 1 + torch.arange(rows), torch.tensor([retention], dtype=torch.float64)
    chosen = select(scores, retentions, visible, query_block, block_score, min_budget=min_budget)[0]
    alone = select(scores, retentions, visible, 1, block_score, min_budget=min_budget)[0]
    for block, own, places in zip(chosen.split(query_block), alone.split(query_block), visible.split(query_block), strict=True):
        n = len(block)
        diagonal = block[:, int(places[0]) - 1 : int(places[-1])]
        assert diagonal.equal(torch.ones_like(diagonal).tril())
        assert block.sum(1).ge(places.clamp(max=min_budget)).all()
        at_least = max(int(own.sum()), n * (n + 1) // 2 + n * min(max(1, min_budget - 1), int(places[0]) - 1))
        assert at_least <= int(block.sum()) < at_least + n


@given(
    rows=st.integers(1, 40),
    offset=st.integers(0, 60),
    query_block=st.sampled_from([1, 4]),
    key_block=st.sampled_from([1, 3, 16]),
    retention=st.floats(0.01, 1.0),
    min_budget=st.sampled_from([1, 2, 16, 17]),
    seed=st.integers(0, 99),
)
def test_a_row_of_whole_blocks_of_keys_has_its_least_budget(rows, offset, query_block, key_block, retention, min_budget, seed):
    """Though the block that holds its own key may have a single one that it sees."""
    scores = torch.randn(1, rows, offset + rows, generator=torch.Generator().manual_seed(seed))
    visible, retentions = offset + 1 + torch.arange(rows), torch.tensor([retention], dtype=torch.float64)
    chosen = select_key_blocks(scores, retentions, visible, query_block, key_block, min_budget)[0]
    assert chosen.sum(1).ge(visible.clamp(max=min_budget)).all()


@given(
    keys=st.integers(1, 40),
    retention=st.floats(0.01, 1.0),
    sinks=st.integers(0, 8),
    recent=st.integers(1, 40),
    min_budget=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 99),
)
def test_a_row_keeps_itself_then_sinks_then_its_nearest_keys(keys, retention, sinks, recent, min_budget, seed):
    """Also where the budget is smaller than sinks and window together."""
    scores = torch.randn(1, 1, keys, generator=torch.Generator().manual_seed(seed))
    retentions = torch.tensor([retention], dtype=torch.float64)
    kept = select(scores, retentions, torch.tensor([keys]), 1, "leading_query", sinks, recent, min_budget)
    kept = kept[0, 0].nonzero()[:, 0].tolist()
    budget = min(keys, max(min_budget, math.ceil(retention * keys)))
    order = list(dict.fromkeys([keys - 1, *range(min(sinks, keys)), *range(keys - 2, max(-1, keys - 1 - recent), -1)]))
    assert len(kept) == budget
    assert set(order[:budget]) <= set(kept)


def test_the_window_of_a_block_ends_at_each_row():
    """Every row finds its own window of 3 keys in the shared list; the first row's begins two keys before the block."""
    scores = torch.zeros(1, 4, 24)
    scores[..., 10] = 1.0
    visible = torch.arange(21, 25)
    kept = select(scores, torch.tensor([0.25], dtype=torch.float64), visible, 4, "max", sinks=1, recent=3)[0]
    for row, places in zip(kept, visible.tolist(), strict=True):
        assert row[places - 3 : places].all()
    assert kept[0].nonzero()[:, 0].tolist() == [0, 10, 18, 19, 20]


@pytest.mark.parametrize("offset", [-1, 6])
def test_refuses_an_offset_without_own_keys(offset):
    with pytest.raises(InputError, match="causal_offset"):
        dense_attention(*qkv(2, 1, 5, 10, 8), causal_offset=offset)


def test_refuses_heads_that_do_not_divide():
    with pytest.raises(InputError, match="multiple of G"):
        dense_attention(*qkv(3, 2, 5, 10, 8), causal_offset=5)


def test_attention_in_int8_with_fine_steps_is_dense_attention():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(heads, 12, 16, generator=generator) for heads in (4, 2, 2))
    fine = {"q_step": q.abs().amax((1, 2)), "k_step": k.abs().amax((1, 2)), "v_step": v.abs().amax((1, 2))}
    fine = {name: step / 127 for name, step in fine.items()}
    made = int8_attention(q, k, v, causal_offset=0, score_step=None, probabilities="float", **fine)
    exact = dense_attention(q, k, v, causal_offset=0)
    assert float((made - exact).norm() / exact.norm()) < 0.02
    assert not made.equal(exact)


def test_probabilities_below_half_a_step_are_lost():
    """300 keys that score alike: each has 1/300 of the probability, which is nearer to 0 than to 1/127."""
    q, k = torch.zeros(1, 1, 16), torch.zeros(1, 300, 16)
    one = torch.ones(1)
    how = {"causal_offset": 299, "q_step": one, "k_step": one, "v_step": one / 127, "score_step": one}
    assert int8_attention(q, k, torch.ones(1, 300, 16), **how).equal(torch.zeros(1, 1, 16))
    assert int8_attention(q, k, torch.ones(1, 300, 16), probabilities="log2", **how)[0, 0, 0] == 300 / 256
    assert int8_attention(q, k, torch.ones(1, 300, 16), probabilities="float", **how)[0, 0, 0] == pytest.approx(1)
