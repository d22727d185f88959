"""Random tensors of the shape of one layer: what speed is measured on."""

import math
from dataclasses import dataclass

import torch

from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.selection import Rule
from shadowattn.online.simulation.device import LAYERS
from shadowattn.types import Heads, Selection

# Query heads, key/value heads and head dimension of one layer of the paper's models, and of one that is published here.
SHAPES = {name.lower(): (layer.heads, layer.kv_heads, layer.head_dim) for name, layer in LAYERS.items()}
SHAPES |= {"smollm2-135m": (9, 3, 64)}


@dataclass(frozen=True)
class Case:
    """One chunk of `rows` queries, the last ones of `keys` keys."""

    shape: str
    dtype: torch.dtype
    keys: int
    rows: int
    retention: float

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class Tensors:
    """Normally distributed q, k and v of a case, and lists of random keys: for speed, which is what is measured, the worst
    case, since neighbouring rows of a real model share keys."""

    layer = 0  # of a model, where the tensors are captured ones

    def __init__(self, case: Case):
        generator = torch.Generator().manual_seed(0)
        heads, groups, dim = SHAPES[case.shape]
        self.case, self.scale = case, 1 / math.sqrt(dim)
        make = lambda n, rows: torch.randn(n, rows, dim, generator=generator).to(case.dtype)  # noqa: E731
        self.q, self.k, self.v = make(heads, case.rows), make(groups, case.keys), make(groups, case.keys)
        self.heads = Heads.all(heads, groups)
        self.positions = case.keys - case.rows + torch.arange(case.rows)
        self.retention = torch.full((heads,), case.retention, dtype=torch.float64)

    def chunk(self) -> Chunk:
        """All heads as one chunk, of whose keys nothing is derived yet."""
        return Chunk.of(self.q, self.k, self.v, retention=self.retention, scale=self.scale, layer=self.layer)

    def random_lists(self, query_block: int) -> Selection:
        lists = Rule(query_block).lists(self.retention, self.positions)
        generator = torch.Generator().manual_seed(1)
        parts = [
            NativeKernels().select(torch.rand(1, len(lists.candidates), self.case.keys, generator=generator), one)
            for one in [Rule(query_block).lists(self.retention[:1], self.positions)] * len(self.heads)
        ]
        return Selection.cat(parts)
