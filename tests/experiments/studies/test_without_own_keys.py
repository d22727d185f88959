"""Shared lists without the block's own keys: as many keys as single rows keep, none after the block's first row."""

import pytest
import torch

from experiments.studies.without_own_keys import WithoutOwnKeys
from shadowattn.budget import keep_counts
from shadowattn.kernels import TorchKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.selection import Rule
from tests.tensors import qkv


@pytest.mark.parametrize("block_score", ["leading_query", "probability"])
@pytest.mark.parametrize(("rows", "offset", "min_budget"), [(32, 64, 1), (30, 5, 1), (30, 5, 16)])
def test_lists_end_at_the_blocks_first_row(rows, offset, min_budget, block_score):
    q, k, _ = qkv(4, 2, rows, rows + offset, 32)
    chunk, rule = Chunk.of(q, k, retention=[0.1, 0.2, 0.5, 1.0]), Rule(8, block_score, min_budget=min_budget)
    lists = rule.lists(chunk.retention, chunk.positions)
    found = WithoutOwnKeys().select(chunk, rule, lists, TorchKernels())
    blocks = -(-rows // 8)
    budgets = keep_counts(chunk.retention, chunk.positions + 1, min_budget)
    for head in range(4):
        for block in range(blocks):
            at = head * blocks + block
            kept = found.indices[found.indptr[at] : found.indptr[at + 1]]
            first = int(chunk.positions[8 * block])
            assert int(kept.max()) <= first
            mean = budgets[head, 8 * block : 8 * block + 8].float().mean()
            assert len(kept) == min(int(torch.ceil(mean)), first + 1)


def test_lists_of_single_rows_stay_what_they_are():
    q, k, _ = qkv(4, 2, 16, 40, 32)
    chunk = Chunk.of(q, k, retention=0.3)
    lists = Rule().lists(chunk.retention, chunk.positions)
    found = WithoutOwnKeys().select(chunk, Rule(), lists, TorchKernels())
    assert found.indptr.equal(lists.indptr)
