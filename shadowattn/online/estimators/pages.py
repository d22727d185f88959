"""What pages of keys are summed up by, one row of figures a page: kept with the keys and extended with them."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from shadowattn.online.chunk import Chunk

# Above every score that is of use, and finite when the rows of a block are summed.
ALWAYS = 1e30
# A page or a block has no more: one of fewer keys is filled up to the whole in memory.
MOST_KEYS = 2**16


class Pages(ABC):
    """Figures of every `page` keys of k [G, K, D], each float32 [G, P, …]; those of the last page are of the keys that it has."""

    def __init__(self, page: int):
        self.page, self.length = page, 0
        self.figures: tuple[Tensor, ...] = ()

    @abstractmethod
    def sum_up(self, k: Tensor, whole: int) -> tuple[Tensor, ...]:
        """Figures of the pages of float32 k [G, K, D]: `whole` full ones, and one with the rest, if any."""

    def extend(self, k: Tensor) -> None:
        done = self.length // self.page  # of the last page there may be more keys now
        new = k[:, done * self.page :].float()
        figures = self.sum_up(new, new.shape[1] // self.page)
        kept = (old[:, :done] for old in self.figures)
        self.figures = tuple(torch.cat(both, 1) for both in zip(kept, figures, strict=True)) if self.figures else figures
        self.length = k.shape[1]

    def crop(self, length: int) -> None:
        self.length = length // self.page * self.page  # a page that lost keys is made again


def page_scores(chunk: Chunk, scores: Tensor, page: int) -> Tensor:
    """Scores [H, Q, K] of keys, from those [H, Q, P] of their pages.

    A row's own page is always kept: it holds the row's own key, and its figures would depend on keys after the row. Where the
    budget is smaller, its nearest keys come first, the row's own before all.
    """
    spread = scores.repeat_interleave(min(page, chunk.keys), 2)[:, :, : chunk.keys]
    place = torch.arange(chunk.keys, device=chunk.q.device) - (chunk.positions // page * page)[:, None]
    return torch.where(place >= 0, ALWAYS * (1 + place.float() / page), spread)
