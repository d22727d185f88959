"""Every head keeps the same: the baseline of every other allocator."""

from dataclasses import dataclass
from typing import ClassVar

from shadowattn.offline.allocators.base import Allocator


@dataclass(frozen=True)
class Uniform(Allocator):
    needs: ClassVar[frozenset[str]] = frozenset()

    def allocate(self, head_ppl, layer_ppl, *, base_ppl, retention):
        return [[float(retention)] * len(layer) for layer in head_ppl]
