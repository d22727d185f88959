"""Selections seen as masks: for comparison with the reference only."""

import torch
from torch import Tensor

from shadowattn.types import Selection


def as_mask(selection: Selection, keys: int) -> Tensor:
    """bool [H, Q, K], built list by list."""
    heads, rows = selection.counts.shape[0], len(selection.positions)
    mask = torch.zeros(heads, rows, keys, dtype=torch.bool)
    for head in range(heads):
        for row, position in enumerate(selection.positions.tolist()):
            listed = selection.list_of(head, row // selection.query_block)
            mask[head, row, listed[listed <= position]] = True
    return mask
