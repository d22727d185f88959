"""Every head keeps the same: the baseline of every other allocator."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Uniform:
    def allocate(self, head_ppl, layer_ppl, *, base_ppl, retention):
        return [[float(retention)] * len(layer) for layer in head_ppl]
