"""What estimators derive from a layer's keys and keep for as long as the keys: packed integers, the largest value so far.

Whoever holds the keys holds this beside them, one for each layer and sequence, and says when they are cut short (`crop`) or are
others (`clear`). Nobody has to recognise keys by looking at them.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from shadowattn.graphs.symmetric_int8 import absmax, in_parts, shifted, step_scales
from shadowattn.types import KeyOffset


class Derived(Protocol):
    """Something made of the first `length` keys, row by row: it grows with them."""

    length: int

    def extend(self, k: Tensor) -> None:
        """Takes in the rows of k [G, K, D] from `length` on; those before are as they were."""
        ...

    def crop(self, length: int) -> None:
        """Forgets the keys from `length` on. It may forget more: `length` says what is left."""
        ...


D = TypeVar("D", bound=Derived)


class LayerCache:
    """What was derived from one layer's keys of one sequence, by name."""

    def __init__(self):
        self._derived: dict[str, Derived] = {}

    def held(self, name: str) -> Derived | None:
        """What was derived under a name so far."""
        return self._derived.get(name)

    def derived(self, name: str, make: Callable[[], D], k: Tensor) -> D:
        """What is derived of all keys k [G, K, D] under a name; `make()` begins where there is nothing yet.

        Raises `ValueError` where it was derived of more keys: then they are not the beginning of these.
        """
        if name not in self._derived:
            self._derived[name] = make()
        derived = self._derived[name]
        if derived.length > k.shape[1]:
            raise ValueError(f"{name}: derived of {derived.length} keys, got {k.shape[1]}; crop the cache, or use another one")
        derived.extend(k)
        return derived

    def forget(self, name: str) -> None:
        """What was derived under a name is of no use any more."""
        self._derived.pop(name, None)

    def crop(self, length: int) -> None:
        """The keys from `length` on are gone, or will be others."""
        for derived in self._derived.values():
            if derived.length > length:
                derived.crop(length)

    def rewind(self, k: Tensor) -> None:
        """As it was when k [G, K, D] was all there is."""
        self.crop(k.shape[1])
        for derived in self._derived.values():
            derived.extend(k)

    def clear(self) -> None:
        """The keys are others altogether."""
        self._derived.clear()


# Keys that are looked at again, at most, where a cache is cropped in the middle of pieces that were put together.
_PIECE = 64


class LargestKey:
    """The largest magnitude of each key head so far, for scales that grow with the prompt.

    With a `key_offset` that of k − offset, of the given `layer`.
    """

    def __init__(self, key_offset: KeyOffset | None = None, layer: int = 0):
        self._offset, self._layer = key_offset, layer
        self.length = 0
        self._ends: list[tuple[int, Tensor]] = []  # after each extension: the keys so far and their largest magnitude [G]
        self._scales: tuple[Tensor, Tensor] | None = None  # the largest magnitudes that these are of, and they

    def extend(self, k: Tensor) -> None:
        new = k[:, self.length :]
        if not new.shape[1]:
            return
        before = self._ends[-1][1] if self._ends else None
        largest = before
        for part in in_parts(new):
            of_part = absmax(shifted(part, self._offset, self._layer))
            largest = of_part if largest is None else torch.maximum(largest, of_part)
        if before is not None and largest.equal(before):
            largest = before  # the same tensor, whose scales are known
        if len(self._ends) > 1 and k.shape[1] - self._ends[-2][0] < _PIECE:  # single tokens of a decode become one piece
            self._ends.pop()
        self.length = k.shape[1]
        self._ends.append((self.length, largest))

    def crop(self, length: int) -> None:
        while self._ends and self._ends[-1][0] > length:
            self._ends.pop()
        self.length = self._ends[-1][0] if self._ends else 0

    def scales(self) -> Tensor:
        """The real value of one integer step, largest / 127; float32 [G]. Raises `InputError` on NaN or infinity in the keys."""
        largest = self._ends[-1][1]
        if self._scales is None or self._scales[0] is not largest:
            self._scales = largest, step_scales(largest)
        return self._scales[1]
