"""Two looks: the candidates are the best by signs, the list the best of them by integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowattn
from shadowattn.budget import keep_counts
from shadowattn.errors import InputError
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.per_token import PerToken
from shadowattn.online.estimators.sign1 import Sign1
from shadowattn.online.selection import Rule
from tests.tensors import qkv


@given(
    rows=st.integers(1, 9),
    before=st.sampled_from([0, 1, 40, 90]),
    retention=st.sampled_from([0.02, 0.1, 0.4, 1.0]),
    candidates=st.sampled_from([1.0, 2.5, 5.0]),
    seed=st.integers(0, 99),
)
def test_a_row_keeps_the_best_integers_of_the_best_signs(rows, before, retention, candidates, seed):
    q, k, _ = qkv(4, 2, rows, rows + before, 16, seed=seed)
    chunk = Chunk.of(q, k, retention=retention)
    lists = Rule().lists(chunk.retention, chunk.positions)
    found = Hierarchical(candidates).select(chunk, Rule(), lists, TorchKernels())
    signs, integers = Sign1().scores(chunk), PerToken(8).scores(chunk)
    visible, expected = chunk.positions + 1, []
    wide = keep_counts((chunk.retention * candidates).clamp(max=1.0), visible).tolist()
    kept = keep_counts(chunk.retention, visible).tolist()
    for head in range(4):
        for row, position in enumerate(chunk.positions.tolist()):
            order = signs[head, row, : position + 1].sort(descending=True, stable=True).indices
            through = order[: wide[head][row]].sort().values
            best = integers[head, row, through].sort(descending=True, stable=True).indices
            expected += through[best[: kept[head][row]]].sort().values.tolist()
    assert found.indices.tolist() == expected


def test_it_keeps_the_contract():
    shadowattn.check_estimator(Hierarchical())


def test_with_every_key_a_candidate_it_ranks_by_integers():
    q, k, v = qkv(4, 2, 12, 52, 16)
    twice = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=40, estimator=Hierarchical(1e6))
    once = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=40, estimator=PerToken(8))
    torch.testing.assert_close(twice, once)


def test_what_it_cannot_do_is_refused():
    q, k, v = qkv(4, 2, 12, 52, 16)
    with pytest.raises(InputError, match=r"candidates: expected 1 or more times the budget, got 0\.5"):
        Hierarchical(0.5)
    with pytest.raises(InputError, match="hierarchical: looks twice for single rows, got query_block=4"):
        shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=40, estimator=Hierarchical(), query_block=4)
