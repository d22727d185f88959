"""Blocks by the sums along their antidiagonals (XAttention, arXiv 2503.16428, section 2.1)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import Estimator
from shadowattn.online.estimators.blocks import row_blocks, row_scores
from shadowattn.online.estimators.pages import MOST_KEYS
from shadowattn.types import EstimateCost


@dataclass(frozen=True)
class XAttention(Estimator):
    """A block of `block` keys scores, for a block of as many rows, the attention that its antidiagonals promise.

    Each square of `stride` rows × `stride` keys gives one logit, the sum of q·k along its antidiagonal times scale / stride; the
    softmax of each line of squares, over those up to the line's own, is summed over the block. All rows of a block rank alike,
    except that a row's own block of keys is always kept.
    Departures: the paper takes blocks until a share of the attention is reached, here retention decides; rows of a block that
    other chunks hold add nothing; a row's own block is an option of the authors' code, and so are sinks, which here
    `selection.sinks` keeps for any estimator.
    """

    stride: int = 8
    block: int = 128
    sees: ClassVar[str] = "chunk"

    def __post_init__(self):
        checks.fields(self, checks.integer, "stride", "block", least=1, most=MOST_KEYS)
        if self.block % self.stride:
            raise InputError(f"block: expected a multiple of stride={self.stride}, got {self.block}")

    @property
    def ranked_together(self) -> tuple[int, int]:
        return self.block, self.block

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost:
        """With the sums of the softmax and of the blocks, a square at a time."""
        return EstimateCost.of(head_dim / self.stride, 32) + EstimateCost.adding(2 / self.stride**2)

    def scores(self, chunk: Chunk) -> Tensor:
        stride = self.stride
        of_row, lines = row_blocks(chunk, stride)
        q = chunk.q.new_zeros(len(chunk.heads), lines, stride, chunk.q.shape[2], dtype=torch.float32)
        q[:, of_row, stride - 1 - chunk.positions % stride] = chunk.q.float()
        k = F.pad(chunk.k.float(), (0, 0, 0, -chunk.keys % stride)).unflatten(1, (-1, stride)).flatten(2)
        first = chunk.first_position // stride
        line = torch.arange(first, first + lines, device=q.device)
        later = torch.arange(k.shape[1], device=q.device) > line[:, None]
        of_block = line // (self.block // stride) - line[0] // (self.block // stride)
        scores = q.new_zeros(len(q), int(of_block[-1]) + 1, -(-chunk.keys // self.block))
        for head, group in enumerate(chunk.heads.kv.tolist()):
            logits = (q[head].flatten(1) @ k[group].T) * (chunk.scale / stride)
            promised = torch.softmax(logits.masked_fill_(later, -torch.inf), -1)
            squares = F.pad(promised, (0, -k.shape[1] % (self.block // stride))).unflatten(1, (-1, self.block // stride)).sum(2)
            scores[head].index_add_(0, of_block, squares)
        return row_scores(chunk, scores, self.block, self.block)
