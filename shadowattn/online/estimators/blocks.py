"""Query rows in blocks, where a method ranks blocks of keys for blocks of rows."""

import torch
from torch import Tensor

from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.pages import page_scores


def row_blocks(chunk: Chunk, block: int) -> tuple[Tensor, int]:
    """The block of each row among the chunk's, int64 [Q], and how many blocks there are; blocks begin at multiples of `block`."""
    at = chunk.positions // block
    return at - at[0], int(at[-1] - at[0]) + 1


def mean_rows(chunk: Chunk, block: int) -> Tensor:
    """The mean query of every block of rows, float32 [H, B, D]; of a block that the chunk cuts, of the rows that it has."""
    of_row, blocks = row_blocks(chunk, block)
    heads, _, head_dim = chunk.q.shape
    total = chunk.q.new_zeros(heads, blocks, head_dim, dtype=torch.float32).index_add_(1, of_row, chunk.q.float())
    return total / torch.bincount(of_row, minlength=blocks).clamp(min=1)[:, None]


def row_scores(chunk: Chunk, scores: Tensor, query_block: int, key_block: int) -> Tensor:
    """Scores [H, Q, K] of each row, from those of its block of rows for blocks of keys, [H, B, P]; see `page_scores`."""
    of_row, _ = row_blocks(chunk, query_block)
    return page_scores(chunk, scores[:, of_row], key_block)
