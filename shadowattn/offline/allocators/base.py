"""What an allocator is: from what was measured of every head to a retention for each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

Retention = list[list[float]]
"""[L][H], every value in (0, 1]."""


class Allocator(ABC):
    """`needs` says what has to be measured for it: `importance`, the perplexities of ablations; `sensitivity`, a `Sensitivity`
    by `measure`, which is then given as the field of that name; or nothing.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"importance"})

    @abstractmethod
    def allocate(
        self, head_ppl: Sequence[Sequence[float]], layer_ppl: Sequence[float], *, base_ppl: float, retention: float
    ) -> Retention:
        """Retentions [L][H] for perplexities with each head ablated [L][H] and each layer bypassed [L].

        Where it does not need them, all are 1. `retention`: the mean to spread.
        """
