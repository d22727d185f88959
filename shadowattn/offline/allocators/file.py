"""Retentions from a file: a profile that was published, or made elsewhere, in the artifact's format."""

from dataclasses import dataclass
from typing import ClassVar

from shadowattn.errors import InputError
from shadowattn.offline.allocators.base import Allocator
from shadowattn.offline.artifact_files import check_shape, read_retention

# Published files are rounded, and the artifact's own allocator may miss its target.
_MEAN_TOLERANCE = 0.005


@dataclass(frozen=True)
class File(Allocator):
    """`path` names a head-retention.txt for this model's layers and heads, whose mean is the retention asked for."""

    path: str | None = None
    needs: ClassVar[frozenset[str]] = frozenset()

    def allocate(self, head_ppl, layer_ppl, *, base_ppl, retention):
        if not self.path:
            raise InputError("allocator=file: expected a head-retention.txt, got none; set allocator.path=FILE")
        table = read_retention(self.path)
        check_shape(self.path, table, len(head_ppl), len(head_ppl[0]))
        mean = sum(map(sum, table)) / (len(table) * len(table[0]))
        if abs(mean - retention) > _MEAN_TOLERANCE:
            raise InputError(f"{self.path}: its mean retention is {mean:.4g}, asked for {retention:g}; set retention={mean:.3g}")
        return [list(layer) for layer in table]
