import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn import reference
from shadowattn.errors import InputError
from shadowattn.online.selection import BLOCK_SCORES, scored_rows, select


@given(
    rows=st.integers(1, 40),
    offset=st.integers(0, 30),
    query_block=st.sampled_from([1, 2, 7, 16, 64]),
    block_score=st.sampled_from(BLOCK_SCORES),
    retention=st.floats(0.01, 1.0),
    levels=st.sampled_from([1, 2, 5, 1000]),
    seed=st.integers(0, 99),
)
def test_selects_what_the_reference_selects(rows, offset, query_block, block_score, retention, levels, seed):
    """Few score levels make nearly everything a tie."""
    keys = rows + offset
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (2, rows, keys), generator=generator).float()
    retentions = torch.tensor([retention, min(1.0, 2 * retention)], dtype=torch.float64)
    positions = offset + torch.arange(rows)
    needed = scored_rows(rows, query_block, block_score)
    selection = select(scores[:, needed], retentions, positions, query_block=query_block, block_score=block_score)
    expected = reference.select(scores, retentions, positions + 1, query_block, block_score)
    assert _mask(selection, keys).equal(expected)
    assert selection.kept() == int(expected.sum())


def test_lists_are_ascending_and_padded_with_zero():
    scores = torch.tensor([[[3.0, 1, 2, 0], [0, 1, 2, 3]]])
    selection = select(scores, torch.tensor([0.5], dtype=torch.float64), torch.tensor([0, 3]))
    assert selection.counts.tolist() == [[1, 2]]
    assert selection.indices.tolist() == [[[0, 0], [2, 3]]]


def test_refuses_unknown_block_score():
    with pytest.raises(InputError, match="first_row, max"):
        scored_rows(4, 2, "mean")


def test_refuses_a_block_of_no_rows():
    with pytest.raises(InputError, match="at least 1 row"):
        scored_rows(4, 0, "max")


def _mask(selection, keys):
    """bool [H, Q, K], built list by list."""
    heads, rows = selection.indices.shape[0], len(selection.positions)
    mask = torch.zeros(heads, rows, keys, dtype=torch.bool)
    for head in range(heads):
        for row, position in enumerate(selection.positions.tolist()):
            block = row // selection.query_block
            listed = selection.indices[head, block, : selection.counts[head, block]]
            mask[head, row, listed[listed <= position]] = True
    return mask
