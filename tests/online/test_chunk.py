"""Rows of a chunk, some at a time."""

import pytest
import torch

from shadowattn.online.chunk import Chunk
from tests.tensors import qkv


@pytest.mark.parametrize(
    ("rows", "offset", "expected"), [(7, 13, [(0, 4, 17), (4, 7, 20)]), (3, 17, [(0, 3, 20)]), (3, 9, [(0, 3, 12)])]
)
def test_rows_see_keys_up_to_their_own(rows, offset, expected):
    q, k, v = qkv(4, 2, rows, 20, 8)
    chunk = Chunk.of(q, k, v, positions=torch.arange(offset, offset + rows))
    assert [(at.start, at.stop, part.keys) for at, part in chunk.split(4)] == expected
    for at, part in chunk.split(4):
        assert part.q.equal(q[:, at])
        assert part.positions.equal(chunk.positions[at])
        assert part.k.equal(k[:, : part.keys])
        assert part.v.equal(v[:, : part.keys])


def test_no_rows_are_no_parts():
    assert not list(Chunk.of(torch.zeros(2, 0, 8), torch.zeros(2, 5, 8)).split(4))
