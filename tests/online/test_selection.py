import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn import reference
from shadowattn.errors import InputError
from shadowattn.kernels import TorchKernels, torch_kernels
from shadowattn.online import selection as selection_module
from shadowattn.online.chunk import Chunk
from shadowattn.online.selection import BLOCK_SCORES, Rule
from tests.selections import as_mask

QUERY_BLOCKS = [1, 2, 7, 16, 64]


@given(
    rows=st.integers(1, 40),
    offset=st.integers(0, 30),
    query_block=st.sampled_from(QUERY_BLOCKS),
    block_score=st.sampled_from([score for score in BLOCK_SCORES if score != "pooled_query"]),  # which needs queries
    retention=st.floats(0.01, 1.0),
    levels=st.sampled_from([1, 2, 5, 1000]),
    sinks=st.sampled_from([0, 1, 3, 8]),
    recent=st.sampled_from([0, 1, 3, 12]),
    min_budget=st.sampled_from([1, 1, 4, 16, 100]),
    lists_at_once=st.sampled_from([1, 3, 10**6]),
    seed=st.integers(0, 99),
)
def test_selects_what_the_reference_selects(
    rows, offset, query_block, block_score, retention, levels, sinks, recent, min_budget, lists_at_once, seed
):
    """Few score levels make nearly everything a tie; sinks and window are more than many budgets hold. Scores are pooled, and
    selected from, some lists at a time.
    """
    keys = rows + offset
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (2, rows, keys), generator=generator).float()
    retentions = torch.tensor([retention, min(1.0, 2 * retention)], dtype=torch.float64)
    positions = offset + torch.arange(rows)
    rule = Rule(query_block, block_score, sinks, recent, min_budget)
    scored, lists = scores[:, :: query_block if block_score == "leading_query" else 1], rule.lists(retentions, positions)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(selection_module, "_PART_BYTES", 8 * keys * query_block * lists_at_once)
        patched.setattr(torch_kernels, "_MOST_SCORES", keys * lists_at_once)
        selection = TorchKernels().select(rule.pool(scored, positions, torch.full((2,), 0.25)), lists)
    how = (query_block, block_score, sinks, recent, min_budget)
    expected = reference.select(scores, retentions, positions + 1, *how, scale=0.25)
    assert as_mask(selection, keys).equal(expected)
    assert selection.kept() == lists.kept() == int(expected.sum())


@given(rows=st.integers(1, 40), query_block=st.sampled_from(QUERY_BLOCKS), seed=st.integers(0, 99))
def test_a_mean_query_scores_as_the_mean_of_its_rows(rows, query_block, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-4, 5, (2, rows, 8), generator=generator).double()  # double: no rounding on either side
    k = torch.randint(-4, 5, (2, rows, 8), generator=generator).double()
    rule = Rule(query_block, "pooled_query")
    asked = rule.scored(Chunk.of(q, k))
    mean, at = asked.q, asked.positions
    expected = torch.stack([block.mean(1) for block in (q @ k.transpose(1, 2)).split(query_block, 1)], 1)
    torch.testing.assert_close(mean @ k.transpose(1, 2), expected)
    assert at.tolist() == [min(start + query_block, rows) - 1 for start in range(0, rows, query_block)]


@given(
    retention=st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=4),
    position=st.integers(0, 2**31 - 2),
    sinks=st.integers(0, 5),
    recent=st.integers(0, 5),
    min_budget=st.integers(1, 2**31 - 1),
)
def test_the_lists_of_a_step_are_those_of_a_chunk_of_one_row(retention, position, sinks, recent, min_budget):
    rule, positions = Rule(sinks=sinks, recent=recent, min_budget=min_budget), torch.tensor([position])
    expected = vars(rule.lists(torch.tensor(retention, dtype=torch.float64), positions))
    for name, found in vars(rule.step_lists(retention, positions)).items():
        assert found.equal(expected[name]) if isinstance(found, torch.Tensor) else found == expected[name], name


def test_lists_lie_one_after_another_and_ascend():
    scores = torch.tensor([[[3.0, 1, 2, 0], [0, 1, 2, 3]]])
    lists = Rule().lists(torch.tensor([0.5], dtype=torch.float64), torch.tensor([0, 3]))
    selection = TorchKernels().select(scores, lists)
    assert selection.counts.tolist() == [[1, 2]]
    assert selection.indices.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"query_block": 2, "block_score": "mean"}, "leading_query, pooled_query, max, sum, probability"),
        ({"query_block": 0}, "query_block: expected an integer of 1"),
        ({"sinks": -1}, "sinks: expected an integer of 0"),
        ({"min_budget": 0}, "min_budget: expected an integer of 1"),
    ],
)
def test_refuses_a_rule_that_means_nothing(rule, message):
    with pytest.raises(InputError, match=message):
        Rule(**rule)


def test_scores_that_are_no_numbers_are_refused():
    scores = torch.zeros(2, 4, 4)
    scores[1, 2] = float("nan")
    with pytest.raises(InputError, match="scores: expected numbers, got NaN"):
        TorchKernels().select(scores, Rule().lists(torch.full((2,), 0.5, dtype=torch.float64), torch.arange(4)))
