"""What NNCF calibrates its graph on: queries and keys of real text, of every layer and key head."""

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape
from shadowattn.online.chunk import Chunk


def nncf_samples(
    model: PreTrainedModel, windows: Tensor, shape: GraphShape, *, count: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """At most `count` pairs of q [1, 1, M, D] and k [1, 1, keys, D], float32, evenly spread over windows, layers and key heads.

    Of each window [W, T] the last chunk, the only one whose keys fill the graph: T is the graph's number of keys. Raises
    `InputError` on other windows, and on a count below 1.
    """
    if windows.shape[1] != shape.keys or count < 1:
        raise InputError(
            f"samples: expected windows of {shape.keys} tokens and at least 1 sample, got {windows.shape[1]} and {count}; "
            "calibrate on windows as long as the graph's keys"
        )
    samples = []

    def observe(chunk: Chunk) -> None:
        if chunk.keys < shape.keys:
            return
        for group, part in chunk.heads.grouped():
            rows = np.zeros((1, 1, shape.group * shape.rows, shape.head_dim), np.float32)
            queries = chunk.q[part].float().numpy().reshape(1, 1, -1, shape.head_dim)
            rows[:, :, : queries.shape[2]] = queries
            samples.append((rows, chunk.k[None, group : group + 1].float().numpy().copy()))

    observe_prefill(model, windows, observe, chunk_tokens=shape.rows)
    return samples[:: -(-len(samples) // count)]
