"""Time to the first token, dense over sparse, as another engine measures it on the same phone: nothing here is fitted to it.

mllm's port runs on more cores than the paper: dense attention on four threads (the prime core and three middle ones), the
selection on two middle cores, sparse attention on the prime core, and all heads of a layer in one launch, whose scores are
handed over when all of them are done.
"""

from dataclasses import dataclass

from shadowattn.online.makespan import makespan
from shadowattn.online.plan import Launch, Plan, Work
from shadowattn.online.simulation.device import ChunkShape, Device, Layer

_DENSE_MIDDLE_CORES, _SELECT_MIDDLE_CORES = 3, 2
# Beside the phone's own parameters, and assumed like them: what several cores are worth, and how fast the linear layers run.
RANGES = {"core_efficiency": (0.5, 1.0), "linear_tokens_per_s": (300.0, 1500.0)}


@dataclass(frozen=True)
class Model:
    """Layers of one shape, the first `dense_layers` of which stay dense; weights of all linear layers in billions."""

    layer: Layer
    layers: int
    dense_layers: int
    linear_weights: float
    chunk_tokens: int


MODELS = {
    "Qwen2.5-1.5B": Model(Layer(12, 2, 128), 28, 2, 1.31, 512),
    "Qwen1.5-1.8B": Model(Layer(16, 16, 128), 24, 1, 1.21, 256),
    "Qwen1.5-0.5B": Model(Layer(16, 16, 64), 24, 1, 0.308, 128),
}


def ttft_us(
    device: Device, model: Model, tokens: int, retention: float, *, core_efficiency: float, linear_tokens_per_s: float
) -> tuple[float, float]:
    """Dense and sparse time to the first token of a prompt. `retention` is that of the sparse layers.

    The linear layers take the same in both: `linear_tokens_per_s` for a billion weights. Raises `InputError` where the speed of
    a prime core or of dense attention is unknown.
    """
    prime = device.on_core("prime")
    cores = (device.core_speeds["prime"].value + _DENSE_MIDDLE_CORES) * core_efficiency
    dense = sparse = 0.0
    for end in range(model.chunk_tokens, tokens + 1, model.chunk_tokens):
        chunk = ChunkShape(model.chunk_tokens, end)
        dense += model.layer.heads * device.head_dense_us(model.layer, chunk) / cores
        sparse += _sparse_us(device, prime, model.layer, chunk, retention, core_efficiency)
    rest = 1e6 * tokens * model.linear_weights / linear_tokens_per_s
    sparse_layers = model.layers - model.dense_layers
    return rest + model.layers * dense, rest + model.dense_layers * dense + sparse_layers * sparse


def _sparse_us(device: Device, prime: Device, layer: Layer, chunk: ChunkShape, retention: float, core_efficiency: float) -> float:
    heads = tuple(range(layer.heads))
    select = device.head_select_us(chunk, retention) / (_SELECT_MIDDLE_CORES * core_efficiency)
    work = Work(
        (Launch(heads, device.estimate_us(layer, chunk, layer.heads)),),
        (select,) * layer.heads,
        (prime.head_attend_us(layer, chunk, retention),) * layer.heads,
    )
    return makespan(work, Plan((0,), heads))
