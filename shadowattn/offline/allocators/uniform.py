"""Every head keeps the same: the baseline of every other allocator."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Uniform:
    uses_importance: ClassVar[bool] = False

    def allocate(self, head_ppl, layer_ppl, *, base_ppl, retention):
        return [[float(retention)] * len(layer) for layer in head_ppl]
