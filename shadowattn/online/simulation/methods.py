"""One layer's attention over a whole prompt, simulated for the five methods that the paper compares (section 4)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shadowattn.errors import InputError
from shadowattn.online.plan import Group
from shadowattn.online.schedulers.johnson import Johnson
from shadowattn.online.simulation.device import ChunkShape, Device, Layer, known
from shadowattn.online.simulation.events import simulate

# What C/G-Block-Sparse pools, in either direction.
_BLOCK = 64
# More chunks than this are sampled: costs are linear in keys but for the pipeline's bubbles.
_SAMPLES = 24


@dataclass(frozen=True)
class Cost:
    """Microseconds of a prompt, and of it those that the device and one core were at work."""

    total_us: float
    estimate_us: float
    core_us: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


Method = Callable[[Device, Layer, ChunkShape, float], Cost]


def full(device: Device, layer: Layer, chunk: ChunkShape, retention: float) -> Cost:
    """C/G-Full: dense attention in floating point on one core."""
    core = layer.heads * device.head_dense_us(layer, chunk)
    return Cost(core, 0.0, core)


def sparse(device: Device, layer: Layer, chunk: ChunkShape, retention: float) -> Cost:
    """C/G-Sparse: scores, selection and sparse attention, all on one core, in float32: dense's cost for what is kept."""
    score, dense = device.head_score_us(layer, chunk), device.head_dense_us(layer, chunk)
    core = layer.heads * (score + device.head_select_us(chunk, retention) + SPARSE_OVERHEAD * retention * dense)
    return Cost(core, 0.0, core)


def block_sparse(device: Device, layer: Layer, chunk: ChunkShape, retention: float) -> Cost:
    """C/G-Block-Sparse: the same with queries and keys pooled over 64 × 64 blocks before the scores."""
    score, dense = device.head_score_us(layer, chunk), device.head_dense_us(layer, chunk)
    pooled = (score + device.head_select_us(chunk, retention)) / _BLOCK**2
    core = layer.heads * (pooled + retention * dense)
    return Cost(core, 0.0, core)


def npu_full(device: Device, layer: Layer, chunk: ChunkShape, retention: float) -> Cost:
    """NPU-Full: both products in INT8 on the device. Its softmax is unknown and left out: a lower bound."""
    launches = (min(4, layer.heads - at) for at in range(0, layer.heads, 4))
    busy = sum(2 * device.estimate_us(layer, chunk, heads) for heads in launches)
    return Cost(busy, busy, 0.0)


def ours(device: Device, layer: Layer, chunk: ChunkShape, retention: float, *, query_block: int = 1) -> Cost:
    """The estimate on the device, selection and attention on one core behind it, in a planned order.

    Launches are of one, two or four heads, whichever is fastest: many heads share the fixed part of a launch, few let the core
    begin earlier.
    """
    return min((_pipelined(device, layer, chunk, retention, size, query_block) for size in (1, 2, 4)), key=lambda c: c.total_us)


def _pipelined(device: Device, layer: Layer, chunk: ChunkShape, retention: float, size: int, query_block: int) -> Cost:
    groups = [Group(tuple(range(at, min(at + size, layer.heads)))) for at in range(0, layer.heads, size)]
    work = device.work(layer, chunk, groups, [retention] * layer.heads, query_block=query_block)
    how = {
        "wakeup_latency_us": known(device.wakeup_latency_us),
        "task_overhead_us": known(device.task_overhead_us),
        "device": device.estimate_on,
    }
    timeline = simulate(work, Johnson().plan(work), cores=device.cores.value, **how)
    return Cost(timeline.makespan_us, sum(launch.estimate_us for launch in work.launches), sum(work.select_us + work.attend_us))


def ahead(device: Device, layer: Layer, chunk: ChunkShape, retention: float, *, before_us: float = 0.0) -> Cost:
    """The next layer's estimate on the device beside this layer's selection and attention on one core, which waits for nothing.

    `before_us`: what the device computes first, such as what the estimate is made of. Launches are of four heads, since no core
    waits for the first.
    """
    one = _pipelined(device, layer, chunk, retention, 4, 1)
    device_us = before_us + one.estimate_us
    return Cost(max(device_us, one.core_us), device_us, one.core_us)


def pooled(device: Device, layer: Layer, chunk: ChunkShape, retention: float) -> Cost:
    """Ours with lists shared by 32 rows, scored by the first: estimate and selection cost a thirty-second."""
    return ours(device, layer, chunk, retention, query_block=32)


METHODS: dict[str, Method] = {
    "C/G-Full": full, "C/G-Sparse": sparse, "C/G-Block-Sparse": block_sparse, "NPU-Full": npu_full, "ours": ours,
}  # fmt: skip
# Sparse attention in float32 costs this much more for a kept key than dense: from the paper's Fig. 4a (0.219 at a ratio of 0.2).
# A published value, and no choice: a constant.
SPARSE_OVERHEAD = 1.095


def known_methods(device: Device) -> dict[str, Method]:
    """`METHODS` without those of floating point where the device's description has no costs for them."""
    floating = device.dense_ns is not None and device.score_ns is not None
    return {name: method for name, method in METHODS.items() if floating or not name.startswith("C/G")}


def prompt_cost(
    device: Device, layer: Layer, method: Method, *, tokens: int, chunk_tokens: int = 128, retention: float = 0.2
) -> Cost:
    """One layer over a prompt of `tokens` tokens, chunk by chunk; of very many chunks, a sample."""
    if min(tokens, chunk_tokens) < 1:
        raise InputError(f"expected at least one token, got a prompt of {tokens} in chunks of {chunk_tokens}")
    ends = [*range(chunk_tokens, tokens, chunk_tokens), tokens]
    if len(ends) <= _SAMPLES:
        sampled, weight = ends, [1.0] * len(ends)
    else:
        middles = (np.arange(_SAMPLES) + 0.5) / _SAMPLES * len(ends)
        sampled, weight = [ends[int(at)] for at in middles], [len(ends) / _SAMPLES] * _SAMPLES
    total = Cost(0.0, 0.0, 0.0)
    for end, times in zip(sampled, weight, strict=True):
        rows = chunk_tokens if end % chunk_tokens == 0 else end % chunk_tokens
        cost = method(device, layer, ChunkShape(rows, end), retention)
        total += Cost(*(times * value for value in vars(cost).values()))
    return total
