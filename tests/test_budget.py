import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.budget import head_retentions, keep_count, keep_counts, key_block_counts
from shadowattn.errors import InputError


@given(retention=st.floats(1e-6, 1.0), visible=st.integers(1, 10_000), min_budget=st.integers(1, 100))
def test_keeps_the_ceiling_and_at_least_the_least_budget(retention, visible, min_budget):
    expected = min(visible, max(min_budget, math.ceil(retention * visible)))
    assert keep_counts(head_retentions(retention, 1), torch.tensor([visible]), min_budget).item() == expected
    assert keep_count(retention, visible, min_budget) == expected


@given(retention=st.floats(1e-6, 1.0), visible=st.integers(1, 10_000))
def test_the_least_budget_is_one_key_where_nothing_else_is_said(retention, visible):
    kept = keep_counts(head_retentions(retention, 1), torch.tensor([visible])).item()
    assert kept == keep_count(retention, visible) == max(1, math.ceil(retention * visible))


def test_float32_retention_means_its_decimal():
    # 0.2 in float32 is a little above 0.2; taken literally, a row of 5 keys would keep 2.
    kept = keep_counts(head_retentions(torch.tensor([0.2]), 1), torch.tensor([5, 6]))
    assert kept.tolist() == [[1, 2]]


def test_blocks_of_keys_hold_the_budget_and_the_least_budget():
    budgets, visible = torch.tensor([[1, 16, 17, 40]]), torch.tensor([4, 16, 33, 400])
    assert key_block_counts(budgets, visible, 16).tolist() == [[1, 1, 2, 3]]
    assert key_block_counts(budgets, visible, 16, 17).tolist() == [[1, 1, 2, 3]]  # one key of the row's own block, and 16
    assert key_block_counts(budgets, visible, 16, 18).tolist() == [[1, 1, 3, 3]]
    assert key_block_counts(budgets, visible, 1, 17).tolist() == [[4, 16, 17, 40]]


@pytest.mark.parametrize("retention", [0.0, -0.1, 1.1, float("nan")])
def test_refuses_retention_out_of_range(retention):
    with pytest.raises(InputError, match=r"in \(0, 1\]|expected a finite number"):
        head_retentions(retention, 2)


def test_refuses_another_number_of_heads():
    with pytest.raises(InputError, match="3 query heads, got 2"):
        head_retentions(torch.tensor([0.1, 0.2]), 3)
