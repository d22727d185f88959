"""What is known of a device, number by number with its source, and what an attention chunk costs by it.

A cost is a fixed part and one that grows with the work. Which numbers are published, fitted, assumed or of a datasheet the
device's file says (`devices/NAME.yaml`), and nothing that it does not hold is made up.
"""

from dataclasses import dataclass, field, replace

from shadowattn.errors import InputError
from shadowattn.online.plan import Group, Launch, Work

_ON_CORE = ("copy_ns", "select_us", "select_ns", "list_ns", "attend_us", "attend_ns", "read_ns", "dense_ns", "score_ns")


@dataclass(frozen=True)
class Number:
    """A value, where it comes from, and which kind of knowledge that is (`description.KINDS`)."""

    value: float
    kind: str
    source: str


@dataclass(frozen=True)
class Layer:
    """The shape of one layer's attention: query heads, key/value heads, head dimension."""

    heads: int
    kv_heads: int
    head_dim: int


# Table 5 of the paper.
LAYERS = {
    "PhoneLM-0.5B": Layer(16, 16, 64),
    "PhoneLM-1.5B": Layer(16, 16, 160),
    "Qwen2-0.5B": Layer(14, 2, 64),
    "Qwen2-1.5B": Layer(12, 2, 128),
}


@dataclass(frozen=True)
class ChunkShape:
    """`rows` queries at the end of `keys` keys."""

    rows: int
    keys: int

    @property
    def pairs(self) -> int:
        """(row, key) pairs that causality allows."""
        return self.rows * self.keys - self.rows * (self.rows - 1) // 2


@dataclass(frozen=True)
class Device:
    """Times in nanoseconds a unit of work, on one core where the stage runs on a processor; fixed parts in microseconds.

    `launch_us` and `estimate_ns` (a multiply-accumulate of the whole rectangle) are of the estimate on `estimate_on`;
    `select_us` and `select_ns` (a score) of selection; `attend_us` and `attend_ns` (a kept pair and dimension) of sparse
    attention. Others may be unknown. `dense_ns` (a pair and dimension) of dense attention and `score_ns` (the same) of scores in
    floating point, both on a core: methods that need them are then refused. `copy_ns` (a score of the keys there are, brought
    from the device), `list_ns` (a kept pair, written into its list) and `read_ns` (a value of K or V, read once for a chunk):
    small, and then left out. Selection and attention take no less than memory does at `bandwidth_gb_s` for their scores and keys.
    `cores` is what the processor is worth to stages that run at once, `wakeup_latency_us` what a stage that waited for its head
    takes longer, and `task_overhead_us` what the pipeline itself takes for every launch and head of a stage.
    """

    name: str
    estimate_on: str
    cores: Number
    launch_us: Number
    estimate_ns: Number
    select_us: Number
    select_ns: Number
    attend_us: Number
    attend_ns: Number
    dense_ns: Number | None = None  # None where nothing is known of it, here and below
    score_ns: Number | None = None
    copy_ns: Number | None = None
    list_ns: Number | None = None
    read_ns: Number | None = None
    bandwidth_gb_s: Number | None = None
    wakeup_latency_us: Number | None = None
    task_overhead_us: Number | None = None
    core_speeds: dict[str, Number] = field(default_factory=dict)  # of other kinds of core, the one described being 1

    def on_core(self, kind: str) -> "Device":
        """The same with everything that a core does on another kind of core. Raises `InputError` where its speed is unknown."""
        if kind not in self.core_speeds:
            raise InputError(f"{self.name}: expected a core of {', '.join(self.core_speeds) or 'one kind'}, got {kind!r}")
        speed = self.core_speeds[kind].value
        slower = {name: number for name in _ON_CORE if (number := getattr(self, name)) is not None}
        return replace(self, **{name: replace(number, value=number.value / speed) for name, number in slower.items()})

    def estimate_us(self, layer: Layer, chunk: ChunkShape, heads: int, *, capacity: int = 0, query_block: int = 1) -> float:
        """One launch of `heads` heads on a graph for `capacity` keys (0: as many as there are).

        Blocks of rows that share a list send one query each.
        """
        rows = heads * -(-chunk.rows // query_block)
        products = rows * max(capacity, chunk.keys) * layer.head_dim
        return self.launch_us.value + 1e-3 * (products * self.estimate_ns.value + rows * chunk.keys * known(self.copy_ns))

    def head_select_us(self, chunk: ChunkShape, retention: float, *, query_block: int = 1) -> float:
        """One head's lists. Where it keeps every key nothing is ranked: only the list is written."""
        scores = chunk.pairs / query_block
        per_score = (self.select_ns.value if retention < 1 else 0.0) + retention * known(self.list_ns)
        return self.select_us.value + max(1e-3 * scores * per_score, self._memory_us(scores))

    def head_attend_us(self, layer: Layer, chunk: ChunkShape, retention: float) -> float:
        """One head's attention on its lists."""
        kept = retention * chunk.pairs * layer.head_dim
        once = 2 * chunk.keys * layer.head_dim  # a chunk's rows share what is in the cache
        busy = 1e-3 * (kept * self.attend_ns.value + once * known(self.read_ns))
        return self.attend_us.value + max(busy, self._memory_us(once))

    def head_dense_us(self, layer: Layer, chunk: ChunkShape) -> float:
        """One head's dense attention on a core. Raises `InputError` where its cost is unknown."""
        return chunk.pairs * layer.head_dim * self._needed("dense_ns") * 1e-3

    def head_score_us(self, layer: Layer, chunk: ChunkShape) -> float:
        """One head's scores in floating point on a core. Raises `InputError` where their cost is unknown."""
        return chunk.pairs * layer.head_dim * self._needed("score_ns") * 1e-3

    def _needed(self, name: str) -> float:
        if (number := getattr(self, name)) is None:
            raise InputError(f"{self.name}: expected a description with {name}, got one where it is unknown; add its value")
        return number.value

    def _memory_us(self, values: float) -> float:
        """What memory needs at least for so many 4-byte values."""
        return 4e-3 * values / self.bandwidth_gb_s.value if self.bandwidth_gb_s else 0.0

    def work(
        self,
        layer: Layer,
        chunk: ChunkShape,
        groups: list[Group],
        retention: list[float],
        *,
        capacity: int = 0,
        query_block: int = 1,
    ) -> Work:
        """Costs of a chunk with these launches and a retention for each head."""
        on_device = {"capacity": capacity, "query_block": query_block}
        return Work(
            tuple(Launch(group.heads, self.estimate_us(layer, chunk, len(group.heads), **on_device)) for group in groups),
            tuple(self.head_select_us(chunk, kept, query_block=query_block) for kept in retention),
            tuple(self.head_attend_us(layer, chunk, kept) for kept in retention),
        )


def known(number: Number | None) -> float:
    """Its value, or 0 where nothing is known."""
    return number.value if number else 0.0
