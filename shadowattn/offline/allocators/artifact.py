"""What the authors' released code computes, bit for bit; it differs from the paper's formula in four ways.

Importance is the product of raw perplexities (no baseline is subtracted), clamped at 102400. Retentions above 1 are cut
to 1 and what they lose is handed on, head after head in row-major order, to those below 1. In that pass a head that
would overflow is set to 1 *before* its share is taken off the rest, which therefore does not shrink: the mean may end
above the target. And there is no floor.
"""

from dataclasses import dataclass

from shadowattn.offline.allocators.base import Allocator


@dataclass(frozen=True)
class Artifact(Allocator):
    clamp: float = 102400.0

    def allocate(self, head_ppl, layer_ppl, *, base_ppl, retention):
        heads = len(head_ppl[0])
        importance = [min(head * layer, self.clamp) for row, layer in zip(head_ppl, layer_ppl, strict=True) for head in row]
        total = 0.0
        for value in importance:  # sequential, as theirs: Python's sum compensates from 3.12 on
            total += value
        # The order of the products decides the last bit.
        retentions = [retention * heads * len(head_ppl) * value / total for value in importance]
        overflow, capped = 0.0, 0
        for index, value in enumerate(retentions):
            if value > 1:
                overflow += value - 1
                retentions[index] = 1.0
                capped += 1
        remaining = len(retentions) - capped
        for index, value in enumerate(retentions):
            if value < 1:
                share = overflow / remaining
                remaining -= 1
                if value + share <= 1:
                    retentions[index] = value + share
                    overflow -= share
                else:
                    retentions[index] = 1.0  # and overflow stays: see above
        return [retentions[start : start + heads] for start in range(0, len(retentions), heads)]
